"""Is the text the same? Methods against plain decoding, token for token, and tests of the verification rules.

A pass over several rows rounds differently from a pass over one, so in 16-bit numbers the two best tokens can change
places where they are nearly tied; a difference is called a near-tie only then. Rules are tested in the small worlds of
`foredraft.testing`, in which the target's distribution is known exactly: by exact enumeration, and by a chi-square test
of whole texts, which is all there is to test under matched verification, where the seed decides everything.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from foredraft.api import Generator, Prompt
from foredraft.bench.method import PEER, Method, use
from foredraft.bench.metrics import first_difference
from foredraft.bench.tasks import TaskPrompt
from foredraft.contracts import DraftContext, TokenIds, Verification
from foredraft.control import FixedControl
from foredraft.engine.single import decode, prefill
from foredraft.engine.state import SequenceState
from foredraft.errors import UsageError
from foredraft.graph.layout import lay_out_text
from foredraft.model.rounding import EXACT, dtype_name
from foredraft.request import GenerationOptions
from foredraft.sampling import SamplingOptions
from foredraft.sampling.filters import filter_row, penalize
from foredraft.sampling.noise import gumbel_noise
from foredraft.testing.enumeration import PROMPT, Setting, TableTarget, World, distance, drawn_tree

NEAR_TIE_STEPS = 8.0
"""A gap within this many units in the last place of the larger logit is within rounding."""
ROUNDING = 1e-9
"""Distributions of sound rules differ by less than this."""
LEAST_P = 1e-6
"""A sound rule falls below this once in a million runs."""
_VOCABULARY = 4
_SHAPES = ((1, 1), (3,), (2, 1))  # widths of the levels of drawn trees
_TEXTS, _LENGTH, _NODES = 3000, 2, 4  # texts of the chi-square test, tokens of each, drafted nodes a step
_LEAST_EXPECTED = 5.0  # counts of a class, the usual rule for the chi-square test


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a method's text first differs from plain decoding's."""

    prompt: str  # the task and the prompt's number in it, as in "gsm8k[3]"; "" for a prompt of the user's
    position: int  # of the first id that differs among the emitted ones
    gap: float  # between the two best perturbed logits there, temperature and noise included
    tolerance: float  # a gap up to this is within rounding of the dtype

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap <= self.tolerance


@dataclass(frozen=True, slots=True)
class Proof:
    """How many of a method's texts, and of plain decoding's tokens, were compared, and which texts differ."""

    method: str
    texts: int
    tokens: int
    differences: tuple[Difference, ...]
    exact: bool  # whether rounding excuses none of them; else it does near-ties

    @property
    def identical(self) -> int:
        """How many texts are equal, token for token."""
        return self.texts - len(self.differences)

    @property
    def holds(self) -> bool:
        """Whether there is no difference that rounding does not excuse."""
        return all(each.near_tie and not self.exact for each in self.differences)


def keeps_tokens(method: Method, settings: Mapping[str, Any], vocabulary: int) -> bool:
    """Say whether a method promises the tokens of plain decoding: always, but for sampling under rejection."""
    return method.verification == "matched" or not GenerationOptions.parse(settings).sampling(vocabulary).do_sample


def prove(
    generator: Generator,
    methods: Sequence[Method],
    prompts: Sequence[TaskPrompt],
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    done: Callable[[], None] = lambda: None,
) -> list[Proof]:
    """Compare every method with plain decoding on every prompt; `done` is called after each text.

    The generator's method is changed. Settings are generation arguments without the seed, which is `seed` plus the
    prompt's number.

    Raises:
        UsageError: a method that samples under rejection, whose text differs by design, or the peer, which is not ours.
    """
    for method in methods:
        if method.name == PEER:
            raise UsageError("transformers is not proved here; `foredraft bench run` compares its texts with ours.")
        if not keeps_tokens(method, settings, generator.target.vocabulary):
            raise UsageError(
                f"{method.label} samples under rejection, which keeps the distribution of the text and not its tokens; "
                "compare it without sampling (--temperature 0)."
            )
    texts = [(f"{each.task}[{each.number}]", each.prompt, {**settings, "seed": seed + each.number}) for each in prompts]

    def written() -> list[tuple[int, ...]]:
        found = []
        for _, prompt, given in texts:
            found.append(generator.generate(prompt, **given).token_ids)
            done()
        return found

    generator.use("none")
    plain, proofs = written(), []
    for method in methods:
        use(generator, method)
        differences = [
            difference_between(generator, prompt, given, actual, expected, label)
            for (label, prompt, given), actual, expected in zip(texts, written(), plain, strict=True)
            if actual != expected
        ]
        tokens = sum(len(ids) for ids in plain)
        proofs.append(Proof(method.label, len(texts), tokens, tuple(differences), is_exact(generator)))
    return proofs


def difference_between(
    generator: Generator, prompt: Prompt, given: Mapping[str, Any], actual: Sequence[int], expected: Sequence[int],
    label: str = "",
) -> Difference:  # fmt: skip
    """Return where `actual` ids first differ from plain decoding's, `expected`, and how near a tie it was."""
    position = first_difference(actual, expected)
    prefix = np.concatenate([generator.encode(prompt), np.array(expected[:position], np.int64)])
    return Difference(label, position, *_top_two_gap(generator, prefix, given))


def is_exact(generator: Generator) -> bool:
    """Say whether rounding excuses no difference between the generator's method and plain decoding.

    So it is in float32 and float64, and in any dtype where every pass that verifies is compiled and rows come out the
    same to the last bit with other rows. Drafters that go on from passes of their own verify with the model as it is.
    """
    if dtype_name(generator.target.model) in EXACT:
        return True
    compiled, as_it_is = generator.target.compiled, generator.drafter.needs.target is not None
    return compiled is not None and not as_it_is and compiled.rounds_alike(generator.most_nodes + 1)


def _top_two_gap(generator: Generator, prefix: TokenIds, given: Mapping[str, Any]) -> tuple[float, float]:
    """Return how far apart the two best tokens after `prefix`, int64[n], are, and what is within rounding there.

    Tokens are compared as they are chosen, with penalty, filters, temperature and noise, but no logits processors.
    """
    target = generator.target
    cache = target.new_cache()
    target.prefill(prefix[:-1], cache)
    logits = target.forward(lay_out_text(prefix[-1:], len(prefix) - 1), cache).logits[0]
    sampling = GenerationOptions.parse(given).sampling(target.vocabulary)
    scores = logits.float().cpu().numpy().copy()
    tolerance = NEAR_TIE_STEPS * torch.finfo(logits.dtype).eps * float(np.abs(scores).max())
    if sampling.repetition_penalty != 1.0:
        penalize(scores, prefix, sampling.repetition_penalty)
    if sampling.do_sample:
        weights = filter_row(scores, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        left = np.flatnonzero(weights).astype(np.int64)
        scores = np.log(weights[left]) + gumbel_noise(sampling.seed, len(prefix), left)
        tolerance /= sampling.temperature
    best = np.sort(scores)[-2:]
    return float(best[-1] - best[0]), tolerance


# --- the rules


@dataclass(frozen=True, slots=True)
class RuleProof:
    """One test of a rule: "enumeration", with the greatest difference of a text's probability, or "chi-square"."""

    rule: Verification
    test: str
    of: str  # what was tested, in words
    figure: float  # the difference, or the p-value
    limit: float  # what the figure must stay below (enumeration) or reach (chi-square)

    @property
    def holds(self) -> bool:
        """Whether the rule keeps the target's distribution, as far as this test tells."""
        return self.figure < self.limit if self.test == "enumeration" else self.figure >= self.limit


def prove_rule(rule: Verification, sampling: SamplingOptions) -> list[RuleProof]:
    """Test a verification rule under sampling options; there is nothing to test where they are greedy."""
    if not sampling.do_sample:
        return []
    world = World(_VOCABULARY, Setting(sampling))
    proofs = [RuleProof(rule, "chi-square", f"{_TEXTS} texts of {_LENGTH} tokens", _p_value(rule, world), LEAST_P)]
    if rule == "rejection":
        for widths in _SHAPES:
            of = f"every outcome of a drawn tree of widths {', '.join(map(str, widths))}"
            found = distance(world, drawn_tree(world, widths), len(widths) + 1)
            proofs.append(RuleProof(rule, "enumeration", of, found, ROUNDING))
    return proofs


def _p_value(rule: Verification, world: World) -> float:
    """Write short texts with many seeds; return the p-value of their counts under the target's distribution."""
    counts = Counter(_text(rule, world, seed) for seed in range(_TEXTS))
    exact = world.continued({(): 1.0}, _LENGTH)
    if counts.keys() - exact.keys():
        return 0.0  # a text that the target cannot write
    return chi_square_p([counts[text] for text in exact], [_TEXTS * share for share in exact.values()])


def _text(rule: Verification, world: World, seed: int) -> tuple[int, ...]:
    target = TableTarget(world)
    sampling = replace(world.setting.sampling, seed=seed)
    seq = SequenceState(PROMPT, target.new_cache(), sampling, max_new_tokens=_LENGTH, verification=rule)
    prefill(seq, target)
    settings = {**asdict(sampling), "verification": rule}
    context = DraftContext(world.vocabulary, seed, settings=settings)
    for _ in decode(seq, world.drafter((2, 1)), FixedControl(_NODES), target, context):
        pass
    return tuple(seq.emitted.tolist())


def chi_square_p(counts: list[int], expected: list[float]) -> float:
    """Return the p-value of counts under expected ones; the rarest are pooled until five are expected of the pool."""
    pairs = sorted(zip(expected, counts, strict=True), reverse=True)
    while len(pairs) > 1 and pairs[-1][0] < _LEAST_EXPECTED:
        (rare, few), (more, many) = pairs.pop(), pairs.pop()
        pairs.append((more + rare, many + few))
    if len(pairs) < 2:
        return 1.0
    wanted, found = np.array(pairs, np.float64).T
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    degrees = (len(pairs) - 1) / 2
    return float(torch.special.gammaincc(torch.tensor(degrees).double(), torch.tensor(statistic / 2).double()))
