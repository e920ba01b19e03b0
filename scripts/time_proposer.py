"""Measure the drafting time inside vLLM in milliseconds per step for many requests, without vLLM.

The requests are sections of Python's standard library in the default model's tokens; each grows by one to four tokens
per step.
"""

import argparse
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.integrations.request_drafter import RequestDrafter
from foredraft.integrations.vllm import parse_proposer_options, served_drafter
from foredraft.model.gguf.files import SMOLLM2
from foredraft.model.loading import load_config, load_tokenizer, located

METHODS: dict[str, dict[str, Any]] = {
    "adaptix": {},
    "rest": {},
    "rest, 64 samples": {"samples": 64},
    "rest without a store": {"store": "none"},
    "prompt_lookup": {},
    "auto": {},
}


def library_tokens(count: int) -> np.ndarray:
    """Return `count` token ids of the standard library's text, int32[count]."""
    tokenizer, ids = load_tokenizer(SMOLLM2), []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids += tokenizer(path.read_text(encoding="utf-8", errors="replace")).input_ids
        if len(ids) >= count:
            break
    return np.array(ids[:count], np.int32)


def main() -> None:
    """Print a table row for each method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--length", type=int, default=2000, help="tokens per request")
    parser.add_argument("--most", type=int, default=6, help="num_speculative_tokens")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    model, room = located(SMOLLM2), given.length + 4 * given.steps + given.most + 8
    vocabulary = load_config(model).vocab_size
    texts = library_tokens(given.requests * room).reshape(given.requests, room)
    print(f"{given.requests} requests of {given.length} tokens, {given.most} drafted: ms per step")
    print("| method | median | 95th percentile | reading the prompts |")
    print("|---|---|---|---|")
    for label, own in METHODS.items():
        method, theirs = parse_proposer_options({"method": label.partition(",")[0].partition(" ")[0], **own})
        drafter = served_drafter(method, theirs, model, vocabulary)
        sizes: dict[str, Any] = {"vocabulary": vocabulary, "most": given.most, "longest": room}
        RequestDrafter(drafter, rows=1, **sizes).propose([[1]], np.array([100]), texts)  # compiles the kernels
        requests = RequestDrafter(drafter, rows=given.requests, **sizes)
        milliseconds, lengths = [], np.full(given.requests, given.length)
        drawn = np.random.default_rng(0)
        for _ in range(given.steps):
            clock = time.perf_counter()
            requests.propose([[1]] * given.requests, lengths, texts)
            milliseconds.append(1e3 * (time.perf_counter() - clock))
            lengths = lengths + drawn.integers(1, 5, given.requests)
        median, late = np.quantile(milliseconds[1:], [0.5, 0.95])
        print(f"| {label} | {median:.2f} | {late:.2f} | {milliseconds[0]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
