"""Is the verification rule sound under these sampling options? Exact enumeration, and a chi-square test of whole texts.

Knows the small worlds of `foredraft.testing`, in which the target's distribution is known exactly; the user's model has
no part in it. Under matched verification nothing is random once the seed is given, so there is nothing to enumerate:
its texts are plain decoding's, and the test is whether those have the distribution.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from foredraft.contracts import DraftContext, Verification
from foredraft.control import FixedControl
from foredraft.engine.single import decode, prefill
from foredraft.engine.state import SequenceState
from foredraft.sampling import SamplingOptions
from foredraft.testing.enumeration import PROMPT, Setting, TableTarget, World, distance, drawn_tree

ROUNDING = 1e-9
"""Distributions of sound rules differ by less than this."""
LEAST_P = 1e-6
"""A sound rule falls below this once in a million runs."""
_VOCABULARY = 4
_SHAPES = ((1, 1), (3,), (2, 1))  # widths of the levels of drawn trees
_TEXTS, _LENGTH, _NODES = 3000, 2, 4  # texts of the chi-square test, tokens of each, drafted nodes a step
_LEAST_EXPECTED = 5.0  # counts of a class, the usual rule for the chi-square test


@dataclass(frozen=True, slots=True)
class RuleProof:
    """One test of a rule.

    Attributes:
        rule: "matched" or "rejection".
        test: "enumeration", whose figure is the greatest difference of a text's probability, or "chi-square", whose
            figure is the p-value.
        of: what was tested, in words.
        figure: see `test`.
        limit: what the figure must stay below (enumeration) or reach (chi-square).
    """

    rule: Verification
    test: str
    of: str
    figure: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the rule keeps the target's distribution, as far as this test tells."""
        return self.figure < self.limit if self.test == "enumeration" else self.figure >= self.limit


def prove_rule(rule: Verification, sampling: SamplingOptions) -> list[RuleProof]:
    """Test a verification rule under sampling options; greedy decoding has no distribution to keep, and gives no test.

    Args:
        rule: "matched" or "rejection".
        sampling: the user's temperature, filters and penalty.
    """
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
    exact = world.going_on({(): 1.0}, _LENGTH)
    if counts.keys() - exact.keys():
        return 0.0  # a text that the target cannot write
    return chi_square_p([counts[text] for text in exact], [_TEXTS * share for share in exact.values()])


def _text(rule: Verification, world: World, seed: int) -> tuple[int, ...]:
    target = TableTarget(world)
    sampling = dataclasses.replace(world.setting.sampling, seed=seed)
    seq = SequenceState(PROMPT, target.new_cache(), sampling, max_new_tokens=_LENGTH, verification=rule)
    prefill(seq, target)
    settings = {**dataclasses.asdict(sampling), "verification": rule}
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
