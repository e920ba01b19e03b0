"""A statistical test that texts under rejection verification have the target's law: for drafters that draw.

Where a token was emitted after a node with drawn children, u is where it falls in the target's distribution p there,
each token spread over its own share, in three orders: by p, by q, and by q/p. If q is what the drafter drew from, u is
uniform in each. That the verifier is sound is proved by enumeration in tests/test_rejection.py. Knows the engine; no
particular drafter.
"""

import numpy as np

from foredraft.contracts import Drafter, TokenIds, Verdict
from foredraft.graph.layout import lay_out_text
from foredraft.sampling import Probabilities, SamplingOptions
from foredraft.sampling.filters import distribution
from foredraft.sampling.rejection import as_drawn
from foredraft.testing.recording import Recorder, steps_of, target_of

_BINS, _MOST = 10, 45.0
"""Chi-square with 9 degrees of freedom exceeds 45 with a chance of 1e-6."""
_TEXTS, _NEW_TOKENS = 100, 12
_SOON = 5
"""Texts without a drawn node, after which there will be none."""


def departure_from_law(drafter: Drafter, prompt: TokenIds) -> float:
    """Return the chi-square of u over what it may be: above 1, the law of the text is not the target's.

    It is 0 for a drafter that draws nothing.

    Args:
        drafter: for the toy target's vocabulary, or with a target of its own.
        prompt: int64[n].
    """
    target, recorder = target_of(drafter), Recorder(drafter)
    spread = np.random.default_rng(0)
    places: list[tuple[float, ...]] = []
    for seed in range(_TEXTS):
        options = SamplingOptions(do_sample=True, temperature=1.5, top_p=0.95, seed=seed)
        *_, seq = steps_of(recorder, target, prompt, options, "rejection", _NEW_TOKENS)
        if seed == _SOON and not places:
            return 0.0
        rows = target.forward(lay_out_text(seq.view().ids.copy(), 0), target.new_cache()).logits.numpy()
        for step in recorder.steps:
            if step.verdict is not None:
                places += _places(step.verdict, rows, options, spread)
    expected = len(places) / _BINS
    counts = [np.histogram(each, bins=_BINS, range=(0, 1))[0] for each in zip(*places, strict=True)]
    return max(float(((each - expected) ** 2).sum() / expected) for each in counts) / _MOST


def _places(
    verdict: Verdict, rows: np.ndarray, options: SamplingOptions, spread: np.random.Generator
) -> list[tuple[float, ...]]:
    """Return u in each order for each token of the verdict that was emitted after a node with drawn children."""
    found: list[tuple[float, ...]] = []
    for number, (token, node) in enumerate(zip(verdict.tokens, (-1, *verdict.path), strict=False)):
        children = np.flatnonzero(verdict.draft.parents == node)
        if verdict.draft.q is None or not len(children):
            continue
        law = distribution(rows[verdict.at + number], options)
        q = as_drawn(verdict.draft.q[children[0]])
        by_ratio = np.divide(q, law, out=np.zeros_like(q), where=law > 0)
        found.append(tuple(_place(law, order, token, spread) for order in (law, q, by_ratio)))
    return found


def _place(law: Probabilities, order: Probabilities, token: int, spread: np.random.Generator) -> float:
    before, same = law[order > order[token]].sum(), law[order == order[token]].sum()
    return float(before + spread.random() * same)
