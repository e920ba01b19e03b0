"""Fit the initial rates of `auto` (src/foredraft/index/rates.npz) on texts that a model writes.

    python scripts/fit_rates.py PROMPTS.jsonl [--model smollm2] [--table FILE] [--store STORE] [--out FILE]

Each line has a "prompt". The model answers half of them with 16 drafted nodes and half with 32, greedily and at
T=0.7, and the candidates of the sources and the target's choices are counted. A store is searched for every second pair
of prompts. The prompts must occur neither in a benchmark task nor in the table's and the store's texts.
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
    parser.add_argument("--store", default="none")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("src/foredraft/index/rates.npz"))
    given = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in given.prompts.read_text().splitlines()]
    generator, drafters = foredraft.load(given.model), []
    for store in dict.fromkeys(("none", given.store)):
        generator.use("auto", {"table": given.table, "store": store})
        assert isinstance(generator.drafter, AutoDrafter)
        drafters.append(generator.drafter)
    rates = {False: flat_rates(), True: flat_rates()}
    for sampled in (False, True):
        words = empty_words()
        emitted = steps = 0
        for number, prompt in enumerate(prompts):
            drafter = drafters[number // 2 % len(drafters)]
            drafter.rates, drafter.kept.words = rates, words
            generator.attach("auto", drafter, 32 if number % 2 else 16)
            sampling = {"do_sample": sampled, "temperature": 0.7, "seed": 1} if sampled else {}
            written = generator.generate(prompt, chat=True, max_new_tokens=given.max_new_tokens, **sampling)
            words = drafter.kept.words  # may have grown
            emitted, steps = emitted + written.statistics.emitted, steps + written.statistics.steps
        print(f"{'T=0.7' if sampled else 'greedy'}: {emitted / steps:.3f} tokens per step")
    arrays = {}
    for mode, fit in (("greedy", rates[False]), ("sampled", rates[True])):
        keep = np.minimum(1.0, MOST_SEEN / fit.seen)
        margins = fit.margins * np.minimum(1.0, MOST_SEEN / fit.margins[1])
        fitted = {"hits": fit.hits * keep, "seen": fit.seen * keep, "weights": fit.weights, "margins": margins}
        arrays |= {f"{mode}_{name}": array.astype(np.float32) for name, array in fitted.items()}
    np.savez_compressed(given.out, **arrays)


if __name__ == "__main__":
    main()
