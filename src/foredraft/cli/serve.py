"""`foredraft serve`: an OpenAI- and Anthropic-compatible server on this machine.

Does not depend on the protocols; they are in `foredraft.server`.
"""

import gc
import json
import logging
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli import flags
from foredraft.cli.job import Job
from foredraft.cli.screen import say
from foredraft.errors import UsageError
from foredraft.model.gguf.files import SMOLLM2, is_gguf

KEYS_VARIABLE = "FOREDRAFT_API_KEY"
_LEAST_KEY = 16  # characters (chosen)


@dataclass(frozen=True, slots=True)
class ServedJob(Job):
    """A job whose model is an argument, not an option."""

    model: flags.ModelArgument = SMOLLM2


def name_of(model: str) -> str:
    """Return a model's name for clients: its file's, without the suffix, its folder's, or its hub id."""
    path = Path(model)
    if "/" in model and not path.exists():
        return model
    return path.stem if is_gguf(path) else path.absolute().name


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 allows other machines")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for a free port", min=0, max=65535)] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients; default: its file's or folder's name")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help=f"Key that clients must send; repeatable; or {KEYS_VARIABLE}")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Site whose pages may use the server, or *; repeatable")
    ] = None,
    access_log: Annotated[bool, typer.Option(help="Log each request")] = True,
    max_num_seqs: Annotated[int, typer.Option(help="Maximum number of texts in the batch", min=1, max=256)] = 16,
    max_waiting: Annotated[int, typer.Option(help="Maximum number of waiting texts; more are rejected", min=0)] = 64,
    kv_cache_gib: Annotated[float, typer.Option(help="GiB of the KV cache", min=0.01, max=2**20)] = 1.0,
    timeout: Annotated[float, typer.Option(help="Seconds after which an answer fails", min=1)] = 600.0,
    *,
    job: ServedJob,
    memory: flags.MemoryOption = None,
) -> None:
    """Serve a model to OpenAI and Anthropic clients: /v1/chat/completions, /v1/messages, and a web page."""
    keys = tuple(api_key or filter(None, map(str.strip, os.environ.get(KEYS_VARIABLE, "").split(","))))
    shortest = min(map(len, keys), default=_LEAST_KEY)
    if shortest < _LEAST_KEY:
        raise UsageError(f"An API key has only {shortest} characters; use at least {_LEAST_KEY}.")
    config, model = job.config(memory=memory), job.model
    if keys and config.get("memory") is not None:
        raise UsageError("A memory keeps what all clients share, and API keys share nothing; leave one of them out.")
    try:
        from foredraft.server.running import LOOPBACK, Listening, listen
        from foredraft.server.service import Service
    except ImportError as error:
        raise UsageError(
            f"The server needs packages that are not installed ({error.name}); run pip install 'foredraft[server]'."
        ) from error
    listen(host, port).close()  # fails before the model is loaded
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    generator = job.load(config, {}, {"do_sample": True})  # no request waits for kernels to be compiled
    served_name = name or name_of(model)
    service = Service(
        generator, served_name, config, most_at_once=max_num_seqs, most_waiting=max_waiting,
        cache_bytes=int(kv_cache_gib * 2**30), timeout=timeout,
    )  # fmt: skip
    origins = tuple(cors_origin or ())
    listening = Listening(service, host=host, port=port, keys=keys, origins=origins, access_log=access_log)
    target = generator.target
    faster = " (`foredraft compile` makes it faster)" if target.device.type == "cpu" else ""
    compiled = "compiled" if target.compiled is not None else f"not compiled{faster}"
    shared = "" if service.writer.batch.passes.keeps_prefixes else " Each text of a step has a pass of its own."
    say(f"{served_name} is {compiled}; method {generator.method}.{shared}", "dim")
    if not keys and host not in LOOPBACK:
        say("Whoever reaches this address can use the server; --api-key restricts it.", "yellow")
    typer.echo(f"{listening.address}/v1 is the base URL for clients; {listening.address}/ is a page to try it.")
    typer.echo(example_request(listening.address, served_name, keyed=bool(keys)))
    gc.collect()
    gc.freeze()  # else each full collection goes through the objects of torch too, and stops all texts for 0.3 seconds
    listening.run()


def example_request(address: str, name: str, *, keyed: bool) -> str:
    """Return a command of a shell that asks the server; without a limit, a small model may write on for minutes."""
    asked = [{"role": "user", "content": "What is a hash table?"}]
    body = json.dumps({"model": name, "messages": asked, "max_tokens": 100}, ensure_ascii=False)
    header = " -H 'Authorization: Bearer KEY'" if keyed else ""
    return f"curl {address}/v1/chat/completions{header} -d {shlex.quote(body)}"
