"""Compare a compiled model's distributions with those of the same weights in float32, run by transformers' own code.

foredraft compile MODEL
python scripts/perplexity.py MODEL --data traces/assistant_outputs.jsonl --field output --tokens 40000
"""

import argparse
import json
import math
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from foredraft.api import load
from foredraft.contracts import TokenIds
from foredraft.graph.layout import lay_out_text
from foredraft.model.compiled.package import MOST_ROWS
from foredraft.model.target import TorchTarget

WINDOW = 1024  # tokens of a text that are read one behind the other; chosen


def sums(compiled: TorchTarget, own: TorchTarget, token_ids: TokenIds) -> npt.NDArray[np.float64]:
    """Return sums over all tokens, int64[n], but the first, float64[4].

    They are of both targets' log-probabilities of the token; of 1 where both have the same most probable token; and of
    the Kullback-Leibler divergence of the compiled distribution from the other.
    """
    caches, total = (compiled.new_cache(), own.new_cache()), np.zeros(4)
    for at in range(0, len(token_ids) - 1, MOST_ROWS):
        rows = token_ids[at : min(at + MOST_ROWS, len(token_ids) - 1)]
        following = torch.from_numpy(token_ids[at + 1 : at + 1 + len(rows)])[:, None]
        theirs = []
        for target, cache in zip((compiled, own), caches, strict=True):
            theirs.append(target.forward(lay_out_text(rows, at), cache).logits.double().log_softmax(dim=-1))
            cache.commit(range(len(rows)))
        found, reference = theirs
        same = found.argmax(-1) == reference.argmax(-1)
        divergence = reference.exp() * (reference - found)
        total += [float(each.sum()) for each in (*(one.gather(1, following) for one in theirs), same, divergence)]
    return total


def main() -> None:
    """Print the perplexity of both, and how far their distributions are apart."""
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
    start, count = perf_counter(), len(ids) - len(windows)
    means = sum(sums(compiled.target, own.target, window) for window in windows) / count
    print(f"perplexity: compiled {math.exp(-means[0]):.4f}, float32 {math.exp(-means[1]):.4f}")
    print(f"the same most probable token: {means[2]:.2%} of {count:,}; divergence from float32: {means[3]:.6f}")
    print(f"{perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
