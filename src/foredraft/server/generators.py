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
from foredraft.options import check_known
from foredraft.server.bodies import Speculation
from foredraft.server.stores import Stores
from foredraft.speculation import parse_speculation

_SELECTABLE = ("none", "auto", "adaptix", "rest", "prompt_lookup", "lookahead")  # need no other model and no KV cache
_MOST = 32  # generators kept (chosen); the learned state of `auto` takes a few megabytes


class Generators:
    """Makes generators and caches the most recently used.

    `default` is for requests without a key and without drafting options; `config` is its `speculative_config`.
    """

    def __init__(self, default: Generator, config: Mapping[str, Any], stores: Stores) -> None:
        self.default, self._config, self._stores = default, config, stores
        self._made = lru_cache(_MOST)(self._make)
        self.methods = [name for name in method_names() if name in (default.method, *_SELECTABLE)]

    def get(self, key: str, speculative: Speculation | bool | None) -> Generator:
        """Return the generator of a request; UsageError for an unknown method, option or store."""
        if speculative in (None, True) and not (key and isinstance(self.default.drafter, Learner)):
            return self.default
        if not isinstance(speculative, Speculation):
            speculative = Speculation(method="none" if speculative is False else None)
        folders = tuple(str(self._stores.existing(key, store)) for store in speculative.stores)
        return self._made(key, speculative.model_dump_json(), folders)

    def _make(self, _key: str, speculation_json: str, folders: tuple[str, ...]) -> Generator:
        speculation = Speculation.model_validate_json(speculation_json)
        method = self.default.method if speculation.method is None else speculation.method
        check_known(method, self.methods, "A request cannot select the method", "Methods are")
        if folders and method not in ("auto", "rest"):
            raise UsageError(f"Method {method!r} does not use stores; leave stores out, or select 'auto' or 'rest'.")
        servers = self._config if method == self.default.method else {"verification": self.default.verification}
        config = {**servers, **speculation.options}
        if speculation.num_speculative_tokens is not None:
            config["num_speculative_tokens"] = speculation.num_speculative_tokens
        config.pop("memory", None)  # only the default generator has it
        if folders:
            config["store"] = folders[0]
        drafting = parse_speculation(method, config).drafting
        made = Generator(self.default.target, self.default.tokenizer, **drafting)
        for folder in folders[1:]:
            cast(AutoDrafter | RestDrafter, made.drafter).library.open(folder)
        return made
