"""A vLLM server: started, asked over HTTP, and stopped.

Runs in the environment that `make test-vllm` makes. Knows vLLM's command line and HTTP routes only.
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
"""Characters of a log that are shown: the cause stands far above the last traceback."""
_SERVED = "served"
_PATIENCE = 300
"""Seconds that a server may take to start."""


class ServerEndedError(RuntimeError):
    """The server ended, or did not start in time; the message is the end of its log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion.

    Attributes:
        text: what was written.
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
        port: of this machine.
        log: file for what the server prints.
        speculation: `speculative_config`; None for plain decoding.
        options: foredraft's, for its proposer.

    Raises:
        ServerEndedError: it did not start.
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
    """Return the server's continuation of a text, or answer to a conversation."""
    body: dict[str, Any] = {
        "model": _SERVED, "max_tokens": most, "temperature": temperature, "seed": seed, "return_token_ids": True,
    }  # fmt: skip
    if isinstance(prompt, str):
        choice = json.loads(ask(f"{url}/v1/completions", {**body, "prompt": prompt}))["choices"][0]
        return Answer(choice["text"], tuple(choice["token_ids"]))
    choice = json.loads(ask(f"{url}/v1/chat/completions", {**body, "messages": prompt}))["choices"][0]
    return Answer(choice["message"]["content"], tuple(choice["token_ids"]))


def counter(url: str, name: str) -> float:
    """Return a counter of `/metrics`, such as "spec_decode_num_accepted_tokens"; 0 where there is none."""
    found = re.search(rf"^vllm:{name}(?:_total)?\{{[^}}]*\}} ([0-9.e+]+)$", ask(f"{url}/metrics"), re.MULTILINE)
    return float(found[1]) if found else 0.0


def ask(url: str, body: Mapping[str, Any] | None = None) -> str:
    """Return what an address of the server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310  # our own server
    with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:  # noqa: S310  # the same
        return str(answer.read().decode())


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(_PATIENCE):
        if process.poll() is not None:
            break
        try:
            ask(f"{url}/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
        else:
            return
    raise ServerEndedError(log.read_text(encoding="utf-8")[-_SHOWN:])
