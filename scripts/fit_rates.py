"""Fit the initial rates of `auto` (src/foredraft/index/rates.npz) on texts that a model writes.

    python scripts/fit_rates.py PROMPTS.jsonl [--model smollm2] [--table FILE] [--out FILE]

Each line has a "prompt". The model answers half of them with 16 drafted nodes and half with 32, greedily and at
T=0.7, and the candidates of the sources and the target's choices are counted. The prompts must not occur in a benchmark
task.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import foredraft
from foredraft.drafters.auto import AutoDrafter
from foredraft.index.blend import Rates, prior_rates, rates_of
from foredraft.index.own_words import empty_words

MOST_SEEN = 300.0
"""Maximum count of a fitted cell in candidates, so that the rates can adapt to another model. Chosen."""


def flat_rates() -> Rates:
    """Return uninformed rates: 0.4 / 2 in every cell, equal weights of 0.45, and no correction for noise; chosen."""
    like = prior_rates(sampled=False)
    weights = np.full_like(like.weights, 0.45)
    weights[:, -1] = 0.0
    return rates_of(
        np.full_like(like.hits, 0.4), np.full_like(like.seen, 2.0), weights, np.full_like(like.margins, 2.0)
    )


def main() -> None:
    """Answer the prompts and write the rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--table", default="default")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("src/foredraft/index/rates.npz"))
    given = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in given.prompts.read_text().splitlines()]
    generator = foredraft.load(given.model, method="auto", speculative_config={"table": given.table})
    drafter = generator.drafter
    assert isinstance(drafter, AutoDrafter)
    drafter.rates = {False: flat_rates(), True: flat_rates()}
    for sampled in (False, True):
        drafter.kept.words = empty_words()
        emitted = steps = 0
        for number, prompt in enumerate(prompts):
            generator.attach("auto", drafter, 32 if number % 2 else 16)
            sampling = {"do_sample": sampled, "temperature": 0.7, "seed": 1} if sampled else {}
            written = generator.generate(prompt, chat=True, max_new_tokens=given.max_new_tokens, **sampling)
            emitted, steps = emitted + written.statistics.emitted, steps + written.statistics.steps
        print(f"{'T=0.7' if sampled else 'greedy'}: {emitted / steps:.3f} tokens per step")
    arrays = {}
    for mode, rates in (("greedy", drafter.rates[False]), ("sampled", drafter.rates[True])):
        keep = np.minimum(1.0, MOST_SEEN / rates.seen)
        margins = rates.margins * np.minimum(1.0, MOST_SEEN / rates.margins[1])
        fitted = {"hits": rates.hits * keep, "seen": rates.seen * keep, "weights": rates.weights, "margins": margins}
        arrays |= {f"{mode}_{name}": array.astype(np.float32) for name, array in fitted.items()}
    np.savez_compressed(given.out, **arrays)


if __name__ == "__main__":
    main()
