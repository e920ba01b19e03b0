"""A real vLLM server over HTTP: its texts with foredraft's proposer equal those without."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.toys import TOY
from vllm_server import ServerEndedError, complete, counter, proposer, serving

pytestmark = pytest.mark.vllm

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


def texts(url):
    with ThreadPoolExecutor(8) as streams:
        return list(streams.map(lambda prompt: complete(url, prompt, 64).text, PROMPTS))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with serving(TOY, 8750, tmp_path_factory.mktemp("plain") / "log") as url:
        return texts(url)


@pytest.mark.parametrize("method", METHODS)
def test_eight_concurrent_streams_get_the_texts_of_plain_decoding(plain, method, tmp_path):
    with serving(TOY, 8751, tmp_path / "log", proposer(6), METHODS[method]) as url:
        assert texts(url) == plain
        assert texts(url) == plain  # again, with the prefixes in vLLM's cache
        drafted, accepted = (counter(url, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
    assert 0 < accepted <= drafted


def test_what_is_wrong_is_said_before_the_server_starts(tmp_path):
    wrong = {"method": "adaptics"}
    with (
        pytest.raises(ServerEndedError, match="Did you mean 'adaptix'"),
        serving(TOY, 8752, tmp_path / "log", proposer(6), wrong),
    ):
        pass
