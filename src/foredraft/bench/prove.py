"""Is the text the same? Every method against plain decoding, token for token, with an account of each difference.

Knows the generator's surface. A pass over several rows rounds differently from a pass over one, so in 16-bit numbers
the two best tokens can change places where they are nearly tied; a difference is called a near-tie only then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foredraft.api import Generator, Prompt
from foredraft.bench.method import PEER, Method, use
from foredraft.bench.metrics import first_difference
from foredraft.bench.tasks import TaskPrompt
from foredraft.contracts import TokenIds
from foredraft.errors import UsageError
from foredraft.graph.layout import lay_out_text
from foredraft.model.rounding import EXACT, dtype_name
from foredraft.request import GenerationOptions
from foredraft.sampling.filters import filter_row, penalize
from foredraft.sampling.noise import gumbel_noise

NEAR_TIE_STEPS = 8.0
"""A gap within this many units in the last place of the larger logit is within rounding."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a method's text first differs from plain decoding's.

    Attributes:
        prompt: the task and the prompt's number in it, as in "gsm8k[3]"; "" for a prompt of the user's.
        position: index of the first id that differs among the emitted ones.
        gap: between the two best perturbed logits there (temperature and noise included).
        tolerance: a gap up to this is within rounding of the dtype.
    """

    prompt: str
    position: int
    gap: float
    tolerance: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap <= self.tolerance


@dataclass(frozen=True, slots=True)
class Proof:
    """What a method's texts were worth.

    Attributes:
        method: its label.
        texts: compared.
        tokens: compared, of plain decoding.
        differences: one for each text that is not plain decoding's token for token.
        exact: whether rounding excuses none of them; else it does near-ties.
    """

    method: str
    texts: int
    tokens: int
    differences: tuple[Difference, ...]
    exact: bool

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
    """Compare every method with plain decoding on every prompt, with one seed a prompt.

    Args:
        generator: loaded; its method is changed as the comparison goes.
        methods: to prove.
        prompts: to write about.
        settings: generation arguments without `seed`.
        seed: of the first prompt.
        done: called after each text.

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
    """Return where `actual` ids first differ from those of plain decoding, and how near a tie it was."""
    position = first_difference(actual, expected)
    prefix = np.concatenate([generator.encode(prompt), np.array(expected[:position], np.int64)])
    return Difference(label, position, *top_two_gap(generator, prefix, given))


def is_exact(generator: Generator) -> bool:
    """Say whether rounding excuses no difference between the generator's method and plain decoding.

    So it is in float32 and float64, and in any dtype where every pass that verifies is compiled and a row was
    found to come out the same to the last bit with other rows. Drafters that go on from passes of their own verify with
    the model as it is.
    """
    if dtype_name(generator.target.model) in EXACT:
        return True
    compiled, as_it_is = generator.target.compiled, generator.drafter.needs.target is not None
    return compiled is not None and not as_it_is and compiled.rounds_alike(generator.most_nodes + 1)


def top_two_gap(generator: Generator, prefix: TokenIds, given: Mapping[str, Any]) -> tuple[float, float]:
    """Return how far apart the two best tokens after `prefix`, int64[n], are, and what is within rounding there.

    Tokens are compared as they are chosen, with the penalty and, under sampling, the filters, temperature and position
    noise; logits processors are left out.
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
