"""Start, query and stop a vLLM server.

Runs in the environment of `make test-vllm`. Depends only on vLLM's command line and HTTP routes.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROPOSER = "foredraft.integrations.vllm.Proposer"
_SHOWN = 60_000
"""Characters of a log that are shown. Chosen; the cause is far above the last traceback."""
_SERVED = "served"
_TIMEOUT = 300
"""Time limit in seconds for the server's start, and for an answer. Chosen."""


class ServerEndedError(RuntimeError):
    """The server exited, or did not start in time; the message is the end of its log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion.

    Attributes:
        text: the generated text.
        token_ids: its ids.
    """

    text: str
    token_ids: tuple[int, ...]


def proposer(most: int) -> dict[str, Any]:
    """Return the `speculative_config` of foredraft's proposer."""
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": most}


@contextmanager
def serving(
    model: str,
    port: int,
    log: Path,
    speculation: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Serve a model in float32, and yield the server's address.

    Args:
        model: its folder.
        port: to listen on.
        log: file for the server's output.
        speculation: `speculative_config`; None for plain decoding.
        options: of foredraft's proposer.

    Raises:
        ServerEndedError: the server did not start.
    """
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
        "--served-model-name", _SERVED, "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    if speculation is not None:
        command += ["--speculative-config", json.dumps(speculation)]
    if options is not None:
        command += ["--additional-config", json.dumps({"foredraft": options})]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ)  # noqa: S603  # our own command
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def complete(
    url: str, prompt: str | tuple[Mapping[str, str], ...], most: int, temperature: float = 0.0, seed: int = 0
) -> Answer:
    """Return the server's continuation of a text or its answer to a conversation."""
    body: dict[str, Any] = {
        "model": _SERVED, "max_tokens": most, "temperature": temperature, "seed": seed, "return_token_ids": True,
    }  # fmt: skip
    if isinstance(prompt, str):
        choice = json.loads(ask(f"{url}/v1/completions", {**body, "prompt": prompt}))["choices"][0]
        return Answer(choice["text"], tuple(choice["token_ids"]))
    choice = json.loads(ask(f"{url}/v1/chat/completions", {**body, "messages": prompt}))["choices"][0]
    return Answer(choice["message"]["content"], tuple(choice["token_ids"]))


def counter(url: str, name: str) -> float:
    """Return a counter of `/metrics`, such as "spec_decode_num_accepted_tokens"; 0 if it is missing."""
    found = re.search(rf"^vllm:{name}(?:_total)?\{{[^}}]*\}} ([0-9.e+]+)$", ask(f"{url}/metrics"), re.MULTILINE)
    return float(found[1]) if found else 0.0


def ask(url: str, body: Mapping[str, Any] | None = None) -> str:
    """Return the body of the server's response to a GET, or to a POST with `body`."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310  # our own server
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:  # noqa: S310  # the same
        return str(answer.read().decode())


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(_TIMEOUT):
        if process.poll() is not None:
            break
        try:
            ask(f"{url}/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
        else:
            return
    raise ServerEndedError(log.read_text(encoding="utf-8")[-_SHOWN:])
