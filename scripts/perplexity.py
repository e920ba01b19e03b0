"""Compare the perplexity of a compiled model with that of the same weights in float32, run by transformers' own code.

foredraft compile MODEL
python scripts/perplexity.py MODEL --data traces/assistant_outputs.jsonl --field output --tokens 40000
"""

import argparse
import json
import math
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from foredraft.api import load
from foredraft.contracts import TokenIds
from foredraft.graph.layout import lay_out_text
from foredraft.model.compiled.package import MOST_ROWS
from foredraft.model.target import TorchTarget

WINDOW = 1024  # tokens of a text that are read one behind the other; chosen


def log_likelihood(target: TorchTarget, token_ids: TokenIds) -> float:
    """Return the sum of the log-probabilities of all tokens, int64[n], but the first."""
    cache, total = target.new_cache(), 0.0
    for at in range(0, len(token_ids) - 1, MOST_ROWS):
        rows = token_ids[at : min(at + MOST_ROWS, len(token_ids) - 1)]
        logits = target.forward(lay_out_text(rows, at), cache).logits.double()
        cache.commit(range(len(rows)))
        following = torch.from_numpy(token_ids[at + 1 : at + 1 + len(rows)])
        total += float(logits.log_softmax(dim=-1).gather(1, following[:, None]).sum())
    return total


def main() -> None:
    """Print the perplexity and the seconds of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines")
    parser.add_argument("--field", default="text")
    parser.add_argument("--tokens", type=int, default=40_000)
    given = parser.parse_args()
    compiled = load(given.model, method="none")
    if compiled.target.compiled is None:
        parser.error(f"{given.model} is not compiled; run: foredraft compile {given.model}")
    lines = given.data.read_text(encoding="utf-8").splitlines()
    ids = np.concatenate([compiled.encode(json.loads(line)[given.field]) for line in lines])[: given.tokens]
    windows = np.split(ids, range(WINDOW, len(ids), WINDOW))
    print(f"{len(ids):,} tokens of {given.data} in windows of {WINDOW:,}")
    own = load(given.model, method="none", dtype="float32", compile=False)
    for name, target in (("compiled", compiled.target), ("float32, as it is", own.target)):
        start = perf_counter()
        total = sum(log_likelihood(target, window) for window in windows)
        perplexity = math.exp(-total / (len(ids) - len(windows)))
        print(f"{name}: perplexity {perplexity:.4f}, {perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
