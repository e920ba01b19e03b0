"""A real vLLM server over HTTP: with foredraft's proposer, its texts are those that it writes without."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from foredraft.demo import embedded_path

pytestmark = pytest.mark.vllm

PROPOSER = {"method": "custom_class", "model": "foredraft.integrations.vllm.Proposer", "num_speculative_tokens": 6}
PROMPTS = [
    "def fibonacci(n):",
    "import numpy as np\n\nclass Matrix:",
    "Write a short story about a lighthouse keeper.",
    "Natalia sold 48 clips in April, and half as many in May. How many did she sell altogether?",
    "The capital of France is",
    "for i in range(10):\n    print(",
    "Once upon a time there was a",
    "SELECT name FROM users WHERE",
]
METHODS = {
    "adaptix": {"method": "adaptix"},
    "rest": {"method": "rest"},
    "prompt_lookup": {"method": "prompt_lookup", "prompt_lookup_max": 3},
}


def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310  # our own server
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310  # the same
        return answer.read().decode()


@contextmanager
def server(port, folder, speculation=None, options=None):
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(embedded_path("demo")),
        "--served-model-name", "demo", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    if speculation is not None:
        command += ["--speculative-config", json.dumps(speculation)]
    if options is not None:
        command += ["--additional-config", json.dumps({"foredraft": options})]
    log = folder / f"{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ)
    try:
        wait_for(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_for(process, port, log):
    for _ in range(300):
        if process.poll() is not None:
            raise AssertionError(f"The server ended:\n{log.read_text()[-4000:]}")
        try:
            ask(f"http://127.0.0.1:{port}/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
        else:
            return
    raise AssertionError(f"The server did not start:\n{log.read_text()[-4000:]}")


def complete(url, prompt):
    body = {"model": "demo", "prompt": prompt, "max_tokens": 64, "temperature": 0}
    return json.loads(ask(f"{url}/v1/completions", body))["choices"][0]["text"]


def texts(url):
    with ThreadPoolExecutor(8) as streams:
        return list(streams.map(lambda prompt: complete(url, prompt), PROMPTS))


def counter(url, name):
    found = re.search(rf"^vllm:{name}(?:_total)?\{{[^}}]*\}} ([0-9.e+]+)$", ask(f"{url}/metrics"), re.MULTILINE)
    assert found, f"/metrics has no {name}"
    return float(found[1])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with server(8750, tmp_path_factory.mktemp("plain")) as url:
        return texts(url)


@pytest.mark.parametrize("method", METHODS)
def test_eight_concurrent_streams_get_the_texts_of_plain_decoding(plain, method, tmp_path):
    with server(8751, tmp_path, PROPOSER, METHODS[method]) as url:
        assert texts(url) == plain
        assert texts(url) == plain  # again, with the prefixes in vLLM's cache
        drafted, accepted = (counter(url, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
    assert 0 < accepted <= drafted


def test_what_is_wrong_is_said_before_the_server_starts(tmp_path):
    with (
        pytest.raises(AssertionError, match="Did you mean 'adaptix'"),
        server(8752, tmp_path, PROPOSER, {"method": "adaptics"}),
    ):
        pass
