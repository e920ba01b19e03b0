"""foredraft's training-free drafters inside vLLM, as a proposer of its `custom_class` interface.

`speculative_config={"method": "custom_class", "model": "foredraft.integrations.vllm.Proposer",
"num_speculative_tokens": k}`. Reads vLLM's configuration and passes arrays to `request_drafter`, which drafts. vLLM
itself is imported for its version only.
"""

import importlib
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from foredraft.contracts import Drafter
from foredraft.drafters import make_drafter, parse_options
from foredraft.errors import ForedraftWarning, UsageError, told
from foredraft.integrations.bound_tokenizer import refuse_memory, tokenizer_for
from foredraft.integrations.request_drafter import RequestDrafter
from foredraft.options import shown, whole_number
from foredraft.standard_library import resources_for

SUPPORTED = ("0.32", "0.33")  # versions of vLLM with the proposer interface below; others are rejected
MOST_TOKENS = 128  # the limit of vLLM's rejection sampler (its `MAX_SPEC_LEN`)
KEY = "foredraft"  # the options' key in `additional_config`


class Proposer:
    """The class that vLLM creates with its `vllm.config.VllmConfig`; it calls `propose` after every step.

    UsageError for another version of vLLM, an unsupported option, or more tokens than vLLM verifies; StoreError for a
    table or store that is damaged or belongs to another tokenizer.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_version(_installed_version())
        given = vllm_config.speculative_config.num_speculative_tokens
        most = whole_number(given)
        if most is None or not 1 <= most <= MOST_TOKENS:
            raise UsageError(
                f"num_speculative_tokens is {shown(given)}; vLLM verifies 1 to {MOST_TOKENS} drafted tokens, so give a "
                "number in that range."
            )
        method, own = parse_proposer_options(read_options(vllm_config.additional_config))
        model = vllm_config.model_config
        vocabulary, longest = int(model.get_vocab_size()), int(model.max_model_len)
        made = partial(
            RequestDrafter, served_drafter(method, own, str(model.tokenizer), vocabulary),
            vocabulary=vocabulary, most=most, longest=longest,
        )  # fmt: skip
        warming = made(rows=1)  # drafts for a text of one token and a longer one, so that no request waits for numba
        for length in (1, min(8, longest - 1)):
            warming.propose([[1]], np.array([length], np.int32), np.ones((1, longest), np.int32))
        self._requests = made(rows=int(vllm_config.scheduler_config.max_num_seqs))
        self._warned = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: tables are mapped already. Ignores what vLLM passes."""

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: kernels are compiled already. Ignores what vLLM passes."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any,
        slot_mappings: Any = None,  # noqa: ARG002  # vLLM's signature
    ) -> list[list[int]]:  # fmt: skip
        """Return a chain for each row of the batch, as `RequestDrafter.propose` does, but never raise."""
        try:
            return self._requests.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception as error:  # noqa: BLE001  # the server continues without drafts
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"foredraft's proposer failed ({told(error)}), so the steps in which it fails are "
                    "decoded without drafts; the texts are the same.",
                    ForedraftWarning,
                    stacklevel=2,
                )
            return [[] for _ in sampled_token_ids]


def check_version(version: str | None) -> None:
    """Raise UsageError if this version of vLLM has another proposer interface, or vLLM is not installed (None)."""
    known = ", ".join(SUPPORTED)
    if version is None:
        raise UsageError(f"vLLM is not installed; foredraft's proposer runs inside vLLM {known}: install one of them.")
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise UsageError(
            f"This is vLLM {version}, and foredraft's proposer supports the interface of vLLM {known}, which vLLM "
            "calls experimental; install one of them, or a foredraft that supports this version."
        )


def read_options(additional_config: Any) -> Mapping[str, Any]:
    """Return the options in `additional_config`; UsageError if they are no mapping."""
    given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if given is not None and not isinstance(given, Mapping):
        sentence = f'additional_config[{KEY!r}] holds {shown(given)}; give a mapping such as {{"method": "auto"}}.'
        raise UsageError(sentence)
    return given or {}


def parse_proposer_options(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the method and its options; UsageError for an unknown one, or a value that is not supported."""
    own = dict(given)
    method = own.pop("method", "auto")
    if not isinstance(method, str):
        raise UsageError(f"method is {shown(method)}; give a method's name as text.")
    parse_options(method, own)
    refuse_memory(own)
    if own.get("feedback") not in (None, "off"):
        raise UsageError(f"feedback is {own['feedback']!r}, and vLLM passes a proposer no probabilities; leave it out.")
    if own.get("drafter") is not None:
        raise UsageError(
            f"drafter is {shown(own['drafter'])}, and vLLM runs the model itself, apart from a proposer; leave it out."
        )
    if method == "lookahead":
        raise _needing("lookahead", "best token after every drafted one")
    return method, own


def served_drafter(method: str, own: Mapping[str, Any], tokenizer: str, vocabulary: int) -> Drafter:
    """Create the drafter for a served model; raises as `Proposer`, also if it needs values that vLLM does not pass."""
    drafter = make_drafter(method, own, resources_for(vocabulary, tokenizer_for(tokenizer, None, own)))
    if drafter.needs.hidden:
        raise _needing(method, "hidden states")
    return drafter


def _needing(method: str, what: str) -> UsageError:
    return UsageError(
        f"Method {method!r} needs the model's {what}, which vLLM does not pass to a proposer; choose auto, adaptix, "
        "rest or prompt_lookup."
    )


def _installed_version() -> str | None:
    try:
        return str(importlib.import_module("vllm").__version__)
    except ImportError:
        return None
