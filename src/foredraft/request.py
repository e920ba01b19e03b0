"""One request's generation arguments, checked before the first token: transformers' names, honoured or refused.

Knows the arguments and what they exclude; does not know the model beyond its vocabulary.
"""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.errors import UsageError
from foredraft.options import nearest, options_from
from foredraft.sampling import LogitsProcessor, SamplingOptions

_UNSUPPORTED: Mapping[str, str] = {
    "num_beams": "beam search keeps several texts at once; use do_sample or greedy decoding",
    "num_return_sequences": "one text is written at a time; call generate once for each, with different seeds",
    "assistant_model": "use method='draft_model' with speculative_config={'model': ...}",
    "prompt_lookup_num_tokens": "use method='prompt_lookup' with speculative_config={'prompt_lookup_num_tokens': ...}",
    "max_length": "use max_new_tokens, which does not count the prompt",
    "typical_p": "it is not among the filters; pass transformers' TypicalLogitsWarper in logits_processor",
    "no_repeat_ngram_size": "pass transformers' NoRepeatNGramLogitsProcessor in logits_processor",
}


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Arguments of `generate`.

    Attributes:
        max_new_tokens: tokens to write at most; at least 1.
        do_sample: draw tokens; None means yes if a sampling argument was given, and no for temperature 0.
        temperature: divides the logits; 0 is greedy decoding.
        top_k: keep this many most probable tokens.
        top_p: keep the smallest set with this mass.
        min_p: drop tokens below this share of the most probable one's probability.
        repetition_penalty: above 1 discourages tokens that occurred.
        stop_strings: the text ends behind any of them, which it includes, as in transformers.
        eos_token_id: ids that end the text; None takes the model's own, an empty list none.
        logits_processor: transformers' processors, called with each emitted position's own prefix, in order.
        seed: of the sampling; None draws one, which the result reports.
    """

    max_new_tokens: int = 256
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_strings: str | Sequence[str] = ()
    eos_token_id: int | Sequence[int] | None = None
    logits_processor: Sequence[LogitsProcessor] = ()
    seed: int | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "GenerationOptions":
        """Build from keyword arguments.

        Raises:
            UsageError: an argument that is unknown (with a near-match hint), unsupported (with what to do instead), or
                out of range.
        """
        for name, instead in _UNSUPPORTED.items():
            if name in given:
                raise UsageError(f"generate does not take {name}: {instead}.")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise UsageError(
                    f"generate has no argument {name!r}.{nearest(name, known)} It takes: {', '.join(known)}."
                )
        return options_from(cls, given, "generate")

    def __post_init__(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            UsageError: with the remedy.
        """
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:  # type: ignore[redundant-expr]  # callers may be untyped
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}; it must be a whole number, at least 1.")
        if self.temperature == 0 and self.do_sample:
            raise UsageError(
                "temperature is 0 with do_sample; use do_sample=False for greedy decoding, or a temperature above 0."
            )
        sampling = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if self.temperature not in (None, 0):
            sampling.insert(0, "temperature")
        greedy = self.do_sample is False or (self.do_sample is None and self.temperature == 0)
        if greedy and sampling:
            how = "do_sample=False" if self.do_sample is False else "temperature=0"
            raise UsageError(
                f"{' and '.join(sampling)} would be ignored with {how}; leave "
                f"{'it' if len(sampling) == 1 else 'them'} out, or sample."
            )
        if any(not string for string in self.stops):
            raise UsageError("A stop string is empty; every text would end at once. Leave it out.")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings)

    def eos(self, default: Sequence[int]) -> tuple[int, ...]:
        """Return the ids that end the text, `default` being the model's own."""
        if self.eos_token_id is None:
            return tuple(default)
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)

    def sampling(self, vocabulary: int) -> SamplingOptions:
        """Return how tokens are chosen, with a seed drawn if none was given.

        Raises:
            UsageError: a value out of range, or a top_k beyond the vocabulary.
        """
        if self.top_k is not None and self.top_k > vocabulary:
            raise UsageError(
                f"top_k is {self.top_k} and the model has {vocabulary} tokens; use at most {vocabulary}, or 0 to keep "
                "all."
            )
        asked = any(getattr(self, name) is not None for name in ("temperature", "top_k", "top_p", "min_p"))
        do_sample = self.do_sample if self.do_sample is not None else asked and self.temperature != 0
        return SamplingOptions(
            do_sample=do_sample,
            temperature=self.temperature or 1.0,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            seed=secrets.randbits(32) if self.seed is None else self.seed,
        )
