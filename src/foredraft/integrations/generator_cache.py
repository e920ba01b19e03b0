"""Generators that are reused across calls of `model.generate`, stored as an attribute of the model.

There is no global registry: they are freed with the model, and copies and pickles of the model do not contain them.
Does not depend on what the generators write.
"""

import threading
from collections.abc import Mapping
from typing import Any

from foredraft.api import Generator
from foredraft.engine.statistics import Statistics
from foredraft.integrations.bound_tokenizer import tokenizer_for
from foredraft.model.target import TorchTarget
from foredraft.speculation import parse_speculation

ATTRIBUTE = "_foredraft"  # the attribute's name
MOST_GENERATORS = 4  # stored for a model; the least recently used one is dropped (chosen)


class GeneratorCache:
    """The generators of one model, by configuration, and `last`, the last call's statistics of each row."""

    def __init__(self) -> None:
        self.last: tuple[Statistics, ...] = ()
        self._lock = threading.Lock()
        self._made: list[tuple[tuple[Any, ...], Generator]] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # drafters hold locks and mapped files, and belong to one model: copies and pickles contain None instead
        return type(None), ()

    def generator(self, model: Any, config: Mapping[str, Any]) -> Generator:
        """Return the generator for a configuration, an existing or a new one.

        `config` and the errors are those of `foredraft.generate`. Without `tokenizer`, it is loaded from where the
        model was loaded; UsageError if there is none for a file that is bound to one.
        """
        weight = model.get_input_embeddings().weight
        # a model that was moved, cast or resized, or runs another kernel, gets a new generator
        state = weight.device, weight.dtype, weight.shape, getattr(model.config, "_attn_implementation", None)
        with self._lock:
            for number, (known, generator) in enumerate(self._made):
                if known == (state, config):
                    self._made.append(self._made.pop(number))
                    return generator
            asked = parse_speculation(None, config)
            given = asked.options.pop("tokenizer", None)
            tokenizer = tokenizer_for(str(getattr(model, "name_or_path", None) or ""), given, asked.options)
            generator = Generator(TorchTarget(model), tokenizer, **asked.drafting)
            # a copy, so that the caller's later changes do not matter; models in it are not copied
            copied = {name: dict(value) if isinstance(value, Mapping) else value for name, value in config.items()}
            self._made = [*self._made, ((state, copied), generator)][-MOST_GENERATORS:]
            return generator


def generators_of(model: Any) -> GeneratorCache:
    """Return a model's generator cache, a new one if it has none."""
    if not isinstance(vars(model).get(ATTRIBUTE), GeneratorCache):
        setattr(model, ATTRIBUTE, GeneratorCache())
    cache: GeneratorCache = getattr(model, ATTRIBUTE)
    return cache
