"""Generators for the drafting options of requests: one per options and API key, all with the same model.

Drafters with learned state are not shared between API keys. Does not depend on HTTP.
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

_SELECTABLE = ("none", "auto", "adaptix", "rest", "prompt_lookup", "lookahead")  # need no other model and no KV cache
_MOST = 32  # generators kept (chosen); the learned state of `auto` takes a few megabytes


class Generators:
    """Makes generators and caches the most recently used.

    Args:
        default: for requests without a key and without drafting options.
        config: the options of its method, and its number of nodes as `num_speculative_tokens`.
        stores: the stores that requests may name.
    """

    def __init__(self, default: Generator, config: Mapping[str, Any], stores: Stores) -> None:
        self._default, self._config, self._stores = default, dict(config), stores
        self._made = lru_cache(_MOST)(self._make)

    @property
    def methods(self) -> list[str]:
        """The methods that requests may select."""
        return [name for name in method_names() if name in (self._default.method, *_SELECTABLE)]

    def get(self, key: str, speculative: Speculation | bool | None) -> Generator:
        """Return the generator of a request.

        Raises:
            UsageError: an unknown method, option or store.
            StoreError: a store that is damaged.
        """
        if speculative in (None, True) and not (key and isinstance(self._default.drafter, Learner)):
            return self._default
        method = "none" if speculative is False else None
        speculation = speculative if isinstance(speculative, Speculation) else Speculation(method=method)
        folders = tuple(str(self._stores.existing(key, store)) for store in speculation.stores)
        return self._made(key, speculation.model_dump_json(), folders)

    def _make(self, _key: str, speculation_json: str, folders: tuple[str, ...]) -> Generator:
        speculation = Speculation.model_validate_json(speculation_json)
        method, options = self._default.method, dict(self._config)
        if speculation.method not in (None, method):
            method, options = speculation.method, {}
            if method not in self.methods:
                hint = nearest(method, self.methods)
                raise UsageError(
                    f"The method {method[:80]!r} cannot be selected.{hint} Choose one of {', '.join(self.methods)}."
                )
        options |= speculation.options
        nodes = options.pop("num_speculative_tokens", None)
        nodes = nodes if speculation.num_speculative_tokens is None else speculation.num_speculative_tokens
        if speculation.stores and method not in ("auto", "rest"):
            raise UsageError(f"Method {method!r} does not use stores; leave stores out, or select 'auto' or 'rest'.")
        if folders:
            options["store"] = folders[0]
        options.pop("memory", None)  # only the default generator has it
        made = Generator(self._default.target, self._default.tokenizer, method=method, options=options, nodes=nodes)
        for folder in folders[1:]:
            cast(AutoDrafter | RestDrafter, made.drafter).library.open(folder)
        return made
