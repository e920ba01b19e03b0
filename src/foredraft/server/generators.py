"""A generator for every way to draft that requests ask for, over one model, and apart for every API key.

Knows methods and stores by name. What drafters learn of the target's words they learn for one key only.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from foredraft.contracts import Learner
from foredraft.drafters import method_names
from foredraft.drafters.auto import AutoDrafter
from foredraft.drafters.rest import RestDrafter
from foredraft.errors import UsageError
from foredraft.generator import Generator
from foredraft.options import nearest
from foredraft.server.bodies import Speculation
from foredraft.server.stores import Stores

_FREE = ("none", "auto", "adaptix", "rest", "prompt_lookup", "lookahead")  # of models, heads, and the target's cache
_MOST = 32  # kept; each `auto` takes some megabytes for its words


class Generators:
    """Makes generators and keeps the latest.

    Args:
        default: of requests without a key that ask for nothing else.
        config: its method's options, and its number of nodes as `num_speculative_tokens`.
        stores: that requests may name.
    """

    def __init__(self, default: Generator, config: Mapping[str, Any], stores: Stores) -> None:
        self._default, self._config, self._stores = default, dict(config), stores
        self._made = lru_cache(_MOST)(self._make)

    @property
    def methods(self) -> list[str]:
        """The methods that need nothing but the model and can be asked for."""
        return [name for name in method_names() if name in (self._default.method, *_FREE)]

    def get(self, key: str, asked: Speculation | bool | None) -> Generator:
        """Return the generator of a request.

        Raises:
            UsageError: a method, an option or a store that cannot be had.
            StoreError: a store that is damaged.
        """
        if asked in (None, True) and not (key and isinstance(self._default.drafter, Learner)):
            return self._default
        method = "none" if asked is False else None
        speculation = asked if isinstance(asked, Speculation) else Speculation(method=method)
        folders = tuple(str(self._stores.existing(key, store)) for store in speculation.stores)
        return self._made(key, speculation.model_dump_json(), folders)

    def _make(self, _key: str, asked: str, folders: tuple[str, ...]) -> Generator:
        speculation = Speculation.model_validate_json(asked)
        method, options = self._default.method, dict(self._config)
        if speculation.method not in (None, method):
            method, options = speculation.method, {}
            if method not in self.methods:
                hint = nearest(method, self.methods)
                raise UsageError(
                    f"The method {method[:80]!r} cannot be asked for.{hint} It can be one of {', '.join(self.methods)}."
                )
        options |= speculation.options
        nodes = options.pop("num_speculative_tokens", None)
        nodes = nodes if speculation.num_speculative_tokens is None else speculation.num_speculative_tokens
        if speculation.stores and method not in ("auto", "rest"):
            raise UsageError(f"Method {method!r} searches no stores; leave stores out, or ask for 'auto' or 'rest'.")
        if folders:
            options["store"] = folders[0]
        options.pop("memory", None)  # is the default's alone
        made = Generator(self._default.target, self._default.tokenizer, method=method, options=options, nodes=nodes)
        for folder in folders[1:]:
            cast(AutoDrafter | RestDrafter, made.drafter).library.open(folder)
        return made
