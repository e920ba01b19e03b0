"""What is kept between two calls of `model.generate`: the generators made for a model, on the model itself.

An attribute of the model, and no registry: it goes when the model goes, and copies and pickles of the model are made
without it. Knows models and generators; not what they write.
"""

import threading
from collections.abc import Mapping
from typing import Any

from foredraft.api import Generator
from foredraft.engine.statistics import Statistics
from foredraft.integrations.bound_tokenizer import tokenizer_for
from foredraft.model.target import TorchTarget
from foredraft.speculation import parse_speculation

ATTRIBUTE = "_foredraft"
"""Where a model keeps what was made for it."""
MOST_KEPT = 4
"""Configurations whose drafters are kept for a model; of more, the one used longest ago is dropped."""


class Kept:
    """The generators of one model, by configuration, and `last`, the last call's statistics of each row."""

    def __init__(self) -> None:
        self.last: tuple[Statistics, ...] = ()
        self._lock = threading.Lock()
        self._made: list[tuple[tuple[Any, ...], Generator]] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # drafters hold locks and mapped files, and belong to one model: copies and pickles get None in their place
        return type(None), ()

    def generator(self, model: Any, config: Mapping[str, Any]) -> Generator:
        """Return the generator for a configuration: the one made for it before, or a new one.

        A model that was moved, cast or resized since is another model. Raises as `make_generator`.
        """
        state = _state_of(model)
        with self._lock:
            for number, (known, generator) in enumerate(self._made):
                if known == (state, config):
                    self._made.append(self._made.pop(number))
                    return generator
            generator = make_generator(model, config)
            # a copy, which the caller cannot change any more; models in it stay what they are
            copied = {name: dict(value) if isinstance(value, Mapping) else value for name, value in config.items()}
            self._made = [*self._made, ((state, copied), generator)][-MOST_KEPT:]
            return generator


def kept_on(model: Any) -> Kept:
    """Return what is kept on a model, which is nothing at first."""
    kept = vars(model).get(ATTRIBUTE)
    if not isinstance(kept, Kept):
        kept = Kept()
        setattr(model, ATTRIBUTE, kept)
    return kept


def make_generator(model: Any, config: Mapping[str, Any]) -> Generator:
    """Make a generator for a causal language model of transformers as it stands in memory, in evaluation mode.

    `config` is `speculative_config` as `foredraft.load` takes it, and `tokenizer`: an object or a name. Without it, the
    tokenizer is looked for where the model was loaded from.

    Raises:
        UsageError: an unknown name, option or value, or a file bound to a tokenizer and no tokenizer to be found.
        UnsupportedModelError: a model that cannot be verified as a tree.
        StoreError: a table or store that is damaged or belongs to another tokenizer.
    """
    asked = parse_speculation(None, config)
    given = asked.options.pop("tokenizer", None)
    name = str(getattr(model, "name_or_path", "") or "")
    tokenizer = tokenizer_for(name, given, asked.options)
    return Generator(
        TorchTarget(model),
        tokenizer,
        method=asked.method,
        options=asked.options,
        **asked.amount,
        verification=asked.verification,
    )


def _state_of(model: Any) -> tuple[Any, ...]:
    """Return what a generator was made for: where the weights lie, of which type and how many, and which kernel."""
    weight = model.get_input_embeddings().weight
    return weight.device, weight.dtype, tuple(weight.shape), getattr(model.config, "_attn_implementation", None)
