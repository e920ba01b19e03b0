"""One column of a comparison: a method with its options and its draft length.

Does not depend on prompts, timing or results.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.drafters import method_names
from foredraft.errors import UsageError
from foredraft.options import check_known, json_object
from foredraft.speculation import Speculation, parse_speculation

BASE = "none"
PEER = "transformers"
"""A pseudo-method, "the peer", that runs transformers' `generate`; its options are that function's arguments."""


@dataclass(frozen=True, slots=True)
class Method(Speculation):
    """A configuration of drafting; `method` is `transformers` for the peer."""

    label: str = field(kw_only=True)  # its name in the report


def parse_method(text: str) -> Method:
    """Parse `NAME` or `NAME:{"option": value, ...}`; UsageError for options that are not JSON, or an invalid one.

    They may include `num_speculative_tokens`, `control` and `control_options`.
    """
    name, _, rest = text.partition(":")
    options = json_object(rest or "{}", f"What follows {name!r}")
    if name == PEER:
        return Method(name, options, label=text)
    parsed = parse_speculation(name, options)
    return Method(name, parsed.options, parsed.amount, label=text)


def chosen_methods(texts: Sequence[str]) -> list[Method]:
    """Parse methods; UsageError for an unknown one, with a near-match hint, and for a duplicate."""
    for text in texts:
        check_known(text.partition(":")[0], (*method_names(), PEER), "There is no method", "Methods are")
        if texts.count(text) > 1:
            raise UsageError(f"The method {text} is given twice; give each once.")
    return [parse_method(text) for text in texts]
