"""Tests that drafting is lossless: compares methods with plain decoding token by token.

A pass over several rows rounds differently from a pass over one row, so in 16-bit arithmetic two nearly tied best
tokens can swap; only such a difference is a near-tie. Does not depend on drafters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foredraft.api import Generator, Prompt
from foredraft.bench.method import PEER, Method
from foredraft.bench.tasks import TaskPrompt
from foredraft.errors import UsageError
from foredraft.graph.layout import lay_out_text
from foredraft.graph.tree import common_length
from foredraft.model.rounding import EXACT, dtype_name
from foredraft.request import GenerationOptions
from foredraft.sampling.filters import filter_row, penalize
from foredraft.sampling.noise import gumbel_noise

NEAR_TIE_STEPS = 8.0  # machine epsilons, times the largest absolute logit, that count as rounding (chosen)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a method's text from plain decoding's."""

    prompt: str  # the task and the prompt's number in it, as in "gsm8k[3]"
    position: int  # index of the first differing emitted id
    gap: float  # of the method's token to the best score there, after temperature and noise; infinite without a token
    tolerance: float  # maximum gap that rounding in the dtype explains

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.tolerance


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of comparing a method with plain decoding: numbers of texts and tokens, and the differences."""

    method: str
    texts: int
    tokens: int  # compared: of each text, up to its first difference
    differences: tuple[Difference, ...]
    exact: bool  # whether no difference is allowed; otherwise near-ties are

    @property
    def identical(self) -> int:
        return self.texts - len(self.differences)

    @property
    def near_ties(self) -> int:
        """The number of differences that rounding explains."""
        return 0 if self.exact else sum(each.near_tie for each in self.differences)

    @property
    def holds(self) -> bool:
        """Whether rounding explains every difference."""
        return self.near_ties == len(self.differences)


def prove(
    generator: Generator, methods: Sequence[Method], prompts: Sequence[TaskPrompt], settings: Mapping[str, Any], *,
    seed: int = 0, done: Callable[[], None] = lambda: None,
) -> list[Proof]:  # fmt: skip
    """Compare methods with plain decoding on every prompt; `done` is called after each text.

    Changes the generator's method. `settings` are generation arguments without the seed, which is `seed` plus the
    prompt's number. UsageError for the peer.
    """
    if any(method.method == PEER for method in methods):
        raise UsageError("transformers cannot be proved; `foredraft bench run` compares its texts with ours.")

    def texts() -> list[tuple[int, ...]]:
        found = []
        for each in prompts:
            prompt = each.input(generator.tokenizer)
            found.append(generator.generate(prompt, **settings, seed=seed + each.number).token_ids)
            done()
        return found

    generator.use("none")
    plain, proofs = texts(), []
    for method in methods:
        generator.use(**method.drafting)
        differences, tokens = list[Difference](), 0
        for each, actual, expected in zip(prompts, texts(), plain, strict=True):
            tokens += common_length(actual, expected)
            if actual != expected:
                given, label = {**settings, "seed": seed + each.number}, f"{each.task}[{each.number}]"
                prompt = each.input(generator.tokenizer)
                differences.append(difference_between(generator, prompt, given, actual, expected, label))
        proofs.append(Proof(method.label, len(prompts), tokens, tuple(differences), is_exact(generator)))
    return proofs


def difference_between(
    generator: Generator, prompt: Prompt, given: Mapping[str, Any], actual: Sequence[int], expected: Sequence[int],
    label: str = "",
) -> Difference:  # fmt: skip
    """Return the first difference of the `actual` ids from plain decoding's `expected` ids.

    The scores whose gap it has include penalty, filters, temperature and noise, but no logits processors. The gap is
    infinite where a filter leaves out the actual token, or one of the texts has ended.
    """
    target, position = generator.target, common_length(actual, expected)
    prefix = np.concatenate([generator.encode(prompt), np.array(expected[:position], np.int64)])
    cache = target.new_cache()
    target.prefill(prefix[:-1], cache)
    logits = target.forward(lay_out_text(prefix[-1:], len(prefix) - 1), cache).logits[0]
    sampling = GenerationOptions.parse(given).sampling(target.vocabulary)
    scores = logits.float().cpu().numpy().copy()
    tolerance = NEAR_TIE_STEPS * torch.finfo(logits.dtype).eps * float(np.abs(scores).max())
    penalize(scores, prefix, sampling.repetition_penalty)
    if sampling.do_sample:
        weights = filter_row(scores, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        left = np.flatnonzero(weights).astype(np.int64)
        scores = np.full(len(weights), -np.inf)
        scores[left] = np.log(weights[left]) + gumbel_noise(sampling.seed, len(prefix), left)
        tolerance /= sampling.temperature
    both = position < min(len(actual), len(expected))
    return Difference(label, position, float(scores.max() - scores[actual[position]]) if both else np.inf, tolerance)


def is_exact(generator: Generator) -> bool:
    """Return whether no difference between the generator's method and plain decoding is allowed.

    True for float32 and float64, and for every dtype if all verifying passes are compiled and a row's result is
    bit-identical with any number of rows.
    """
    if dtype_name(generator.target.outline) in EXACT:
        return True
    compiled = generator.target.compiled
    return compiled is not None and compiled.rounds_alike(generator.amount.most_nodes + 1)
