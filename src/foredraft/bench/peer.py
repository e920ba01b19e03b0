"""transformers' own `generate` as a column of the comparison: plain, with prompt lookup, or with an assistant model.

Knows transformers' arguments. Its sampled texts have the same distribution as ours but are drawn otherwise, so only
greedy ones can be identical; and it says nothing of its drafts, so its forwards are counted from outside.
"""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch

from foredraft.api import Generator
from foredraft.bench.cell import Writing
from foredraft.bench.method import Method
from foredraft.engine.statistics import Statistics
from foredraft.errors import UsageError
from foredraft.model.loading import load_model
from foredraft.options import nearest

_KNOWN = ("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_model", "num_assistant_tokens")


def prepared_peer(generator: Generator, method: Method) -> Callable[[Any, Mapping[str, Any]], Writing]:
    """Load the assistant model if one is named; return what writes with transformers' `generate`.

    Raises:
        UsageError: an option that `generate` does not take here, or a model that cannot be loaded.
    """
    options = dict(method.options)
    for name in options:
        if name not in _KNOWN:
            raise UsageError(
                f"The peer transformers has no option {name!r}.{nearest(name, _KNOWN)} Its options are: "
                f"{', '.join(_KNOWN)}."
            )
    if "assistant_model" in options:
        target = generator.target
        options["assistant_model"] = load_model(str(options["assistant_model"]), target.dtype, str(target.device))
    return lambda prompt, arguments: _write(generator, prompt, arguments, options)


@torch.inference_mode()
def _write(generator: Generator, prompt: Any, arguments: Mapping[str, Any], peer: Mapping[str, Any]) -> Writing:
    model = generator.target.model
    ids = torch.from_numpy(generator.encode(prompt))[None].to(generator.target.device)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    options = {name: arguments[name] for name in names if name in arguments}
    sampled = any(name in options for name in ("temperature", "top_k", "top_p", "min_p"))
    torch.manual_seed(arguments["seed"])
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    counting = model.register_forward_pre_hook(count)
    try:
        start = perf_counter()
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=sampled, pad_token_id=0,
            **({"top_k": 0} if sampled else {}), **options, **peer,
        )  # fmt: skip
        new = tuple(output[0, ids.shape[1] :].tolist())
        seconds = perf_counter() - start
    finally:
        counting.remove()
    statistics = Statistics(len(new), forwards, 0, 0, 0, prefill_seconds=0.0, decode_seconds=seconds)
    return Writing(new, ids.shape[1], statistics, seconds, parts={})
