"""Tests that drafting is lossless: compares methods with plain decoding token by token, and tests verification rules.

A pass over several rows rounds differently from a pass over one row, so in 16-bit arithmetic two nearly tied best
tokens can swap; only such a difference is a near-tie. The rules are tested on small tabular targets of
`foredraft.testing`, whose distribution is known exactly: by enumeration, and by a chi-square test of whole texts. Under
matched verification only the latter applies, because there the seed determines the text. Does not depend on drafters.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from foredraft.api import Generator, Prompt
from foredraft.bench.method import PEER, Method
from foredraft.bench.tasks import TaskPrompt
from foredraft.contracts import Verification
from foredraft.control import FixedControl
from foredraft.errors import UsageError
from foredraft.graph.layout import lay_out_text
from foredraft.graph.tree import common_length
from foredraft.model.rounding import EXACT, dtype_name
from foredraft.request import GenerationOptions
from foredraft.sampling import SamplingOptions
from foredraft.sampling.filters import filter_row, penalize
from foredraft.sampling.noise import gumbel_noise
from foredraft.testing.enumeration import PROMPT, World, distance, drawn_tree
from foredraft.testing.recording import begun, written

NEAR_TIE_STEPS = 8.0  # machine epsilons, times the largest absolute logit, that count as rounding (chosen)
ROUNDING = 1e-9  # maximum difference of a correct rule's distribution in float64 (chosen)
LEAST_P = 1e-6  # minimum p-value; a correct rule fails once in a million runs
_VOCABULARY = 4
_SHAPES = ((1, 1), (3,), (2, 1))  # widths of the levels of drawn trees
_TEXTS, _LENGTH, _NODES = 3000, 2, 4  # chi-square test: texts, tokens per text, drafted nodes per step
_LEAST_EXPECTED = 5.0  # minimum expected count per class, the usual rule for the chi-square test


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a method's text from plain decoding's."""

    prompt: str  # the task and the prompt's number in it, as in "gsm8k[3]"; "" for a prompt given by the user
    position: int  # index of the first differing emitted id
    gap: float  # between the two best scores there, after temperature and noise
    tolerance: float  # maximum gap that rounding in the dtype explains

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.tolerance


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of comparing a method with plain decoding: numbers of texts and tokens, and the differences."""

    method: str
    texts: int
    tokens: int
    differences: tuple[Difference, ...]
    exact: bool  # whether no difference is allowed; otherwise near-ties are

    @property
    def identical(self) -> int:
        return self.texts - len(self.differences)

    @property
    def holds(self) -> bool:
        """Whether rounding explains every difference."""
        return all(each.near_tie and not self.exact for each in self.differences)


def prove(
    generator: Generator, methods: Sequence[Method], prompts: Sequence[TaskPrompt], settings: Mapping[str, Any], *,
    seed: int = 0, done: Callable[[], None] = lambda: None,
) -> list[Proof]:  # fmt: skip
    """Compare methods with plain decoding on every prompt; `done` is called after each text.

    A method that samples under rejection is left out, because that keeps the distribution of the text but not its
    tokens. Changes the generator's method. `settings` are generation arguments without the seed, which is `seed` plus
    the prompt's number. UsageError for the peer.
    """
    if any(method.method == PEER for method in methods):
        raise UsageError("transformers cannot be proved; `foredraft bench run` compares its texts with ours.")

    def texts() -> list[tuple[int, ...]]:
        found = []
        for each in prompts:
            found.append(generator.generate(each.prompt(), **settings, seed=seed + each.number).token_ids)
            done()
        return found

    generator.use("none")
    plain, proofs = texts(), []
    sampled = GenerationOptions.parse(settings).sampling(generator.target.vocabulary).do_sample
    for method in (each for each in methods if each.verification == "matched" or not sampled):
        generator.use(**method.drafting)
        differences = []
        for each, actual, expected in zip(prompts, texts(), plain, strict=True):
            if actual != expected:
                given, label = {**settings, "seed": seed + each.number}, f"{each.task}[{each.number}]"
                differences.append(difference_between(generator, each.prompt(), given, actual, expected, label))
        tokens = sum(map(len, plain))
        proofs.append(Proof(method.label, len(prompts), tokens, tuple(differences), is_exact(generator)))
    return proofs


def difference_between(
    generator: Generator, prompt: Prompt, given: Mapping[str, Any], actual: Sequence[int], expected: Sequence[int],
    label: str = "",
) -> Difference:  # fmt: skip
    """Return the first difference of the `actual` ids from plain decoding's `expected` ids.

    The scores whose gap it has include penalty, filters, temperature and noise, but no logits processors.
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
        scores = np.log(weights[left]) + gumbel_noise(sampling.seed, len(prefix), left)
        tolerance /= sampling.temperature
    best = np.sort(scores)[-2:]
    return Difference(label, position, float(best[-1] - best[0]), tolerance)


def is_exact(generator: Generator) -> bool:
    """Return whether no difference between the generator's method and plain decoding is allowed.

    True for float32 and float64, and for every dtype if all verifying passes are compiled and a row's result is
    bit-identical with any number of rows.
    """
    if dtype_name(generator.target.model) in EXACT:
        return True
    compiled = generator.target.compiled
    return compiled is not None and compiled.rounds_alike(generator.amount.most_nodes + 1)


# --- the rules


@dataclass(frozen=True, slots=True)
class RuleProof:
    """The result of one test of a verification rule."""

    rule: Verification
    test: str  # "enumeration" or "chi-square"
    of: str  # description of what was tested
    figure: float  # enumeration: maximum difference of a text's probability; chi-square: p-value
    limit: float  # upper limit of the difference, or lower limit of the p-value

    @property
    def holds(self) -> bool:
        return self.figure < self.limit if self.test == "enumeration" else self.figure >= self.limit


def prove_rule(rule: Verification, sampling: SamplingOptions) -> list[RuleProof]:
    """Test a verification rule under sampling options; greedy options need no test."""
    if not sampling.do_sample:
        return []
    world = World(_VOCABULARY, sampling)
    proofs = [RuleProof(rule, "chi-square", f"{_TEXTS} texts of {_LENGTH} tokens", _p_value(rule, world), LEAST_P)]
    for widths in _SHAPES if rule == "rejection" else ():
        of = f"every outcome of a drawn tree of widths {', '.join(map(str, widths))}"
        found = distance(world, drawn_tree(world, widths), len(widths) + 1)
        proofs.append(RuleProof(rule, "enumeration", of, found, ROUNDING))
    return proofs


def _p_value(rule: Verification, world: World) -> float:
    """Generate short texts with many seeds; return the p-value of their counts under the target's distribution."""
    counts: Counter[tuple[int, ...]] = Counter()
    drafter = world.drafter((2, 1))
    for seed in range(_TEXTS):
        sampling, control = replace(world.sampling, seed=seed), FixedControl(_NODES)
        text = written(begun(drafter, PROMPT, sampling, rule, _LENGTH, control, world)).emitted
        counts[tuple(text.tolist())] += 1
    exact = world.continued({(): 1.0}, _LENGTH)
    if counts.keys() - exact.keys():
        return 0.0  # a text that has probability 0 under the target
    return chi_square_p([counts[text] for text in exact], [_TEXTS * share for share in exact.values()])


def chi_square_p(counts: list[int], expected: list[float]) -> float:
    """Return the chi-square p-value; the rarest classes are pooled until each has `_LEAST_EXPECTED`."""
    pairs = sorted(zip(expected, counts, strict=True), reverse=True)
    while len(pairs) > 1 and pairs[-1][0] < _LEAST_EXPECTED:
        (rare, few), (more, many) = pairs.pop(), pairs.pop()
        pairs.append((more + rare, many + few))
    if len(pairs) < 2:
        return 1.0
    wanted, found = np.array(pairs, np.float64).T
    half = torch.tensor([len(pairs) - 1, ((found - wanted) ** 2 / wanted).sum()], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))
