"""Compare the time of forward passes, by rows, with the time to read the weights at this machine's copy bandwidth.

The weights do not affect the speed, so the model can be random: made by `scripts/random_model.py`, or in memory with
`--random`. With `--transformers`, plain decoding is compared with transformers' `generate`, eager and with a static
cache (which it compiles on a GPU).

    python scripts/forward_against_bandwidth.py FOLDER [--context 1024] [--compile]
    python scripts/forward_against_bandwidth.py --random 7b --device cuda --context 1024 --recorded --transformers
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteriaList

from foredraft.api import Generator
from foredraft.cache_folder import cache_folder
from foredraft.engine.batch import steps
from foredraft.graph.layout import lay_out
from foredraft.graph.tree import chain_parents
from foredraft.model.compiled.build import compile_forward
from foredraft.model.compiled.package import kept_forward
from foredraft.model.cost import measure_cost
from foredraft.model.loading import DTYPES, load_model
from foredraft.model.recordings import RecordedForward
from foredraft.model.target import TorchTarget
from foredraft.sampling import SamplingOptions

SHAPES = {
    "7b": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
}  # fmt: skip
"""Configurations of Llamas. "8b" has grouped key heads, for which a GPU uses other attention kernels."""

_COPIED = 2**29  # bytes; chosen, larger than the processor's caches
_REPEATS = 8
_TOKENS = 64  # tokens per timed text


def random_llama(shape: str, dtype: torch.dtype, device: str) -> Any:
    """Return a Llama of one of the `SHAPES` with random weights, created on `device`."""
    sizes = SHAPES[shape]
    heads = 32 if sizes["hidden_size"] >= 4096 else 4
    config = LlamaConfig(**{
        "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 8192,
        "bos_token_id": None, "eos_token_id": None, **sizes,
    })  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # so that no weight is created in float32
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return model


def copy_bandwidth(device: torch.device, size: int = _COPIED) -> float:
    """Return the bytes per second, read plus written, of the fastest copy of `size` bytes."""
    source, copied = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(_REPEATS):
        start = perf_counter()
        copied.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - start)
    return 2 * size / min(seconds)


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the weights that a pass reads: all, without an embedding that is not tied to the LM head."""
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
    every = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return every if tied else every - embedding.numel() * embedding.element_size()


def busy_seconds(run: Callable[[], object], device: torch.device) -> float | None:
    """Return the seconds that the device is busy during one call of `run`; None on a CPU."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_REPEATS):
            run()
        torch.cuda.synchronize(device)
    kernels = [event for event in profiled.key_averages() if event.device_type == DeviceType.CUDA]
    return sum(event.self_device_time_total for event in kernels) / 1e6 / _REPEATS


def timed_passes(target: TorchTarget, rows: list[int], context: int) -> list[dict[str, Any]]:
    """Return the minimum time of passes by rows, and how long the device is busy."""
    curve, _ = measure_cost(target, tuple(rows), seconds=5.0, context=context)
    cache = target.new_cache()
    target.prefill(np.arange(context, dtype=np.int64) % target.vocabulary, cache)
    found = []
    for count, seconds in zip(curve.rows, curve.seconds, strict=True):
        tokens = (np.arange(count - 1) % target.vocabulary).astype(np.int32)
        layout = lay_out(0, tokens, chain_parents(count - 1), context)
        target.forward(layout, cache)
        busy = busy_seconds(lambda layout=layout: target.forward(layout, cache), target.device)
        found.append({"rows": count, "seconds": seconds, "busy_seconds": busy})
    return found


def our_seconds_per_token(target: TorchTarget, prompt: np.ndarray, tokens: int = _TOKENS) -> float:
    """Return the seconds per token of plain greedy decoding after `prompt`, int64[n]: the faster of two texts."""
    generator = Generator(target, None, method="none", options={}, nodes=None)
    seconds = []
    for _ in range(2):
        run = generator.begin(prompt, SamplingOptions(), max_new_tokens=tokens)
        for _record in steps(run):
            pass
        seconds.append(run.statistics.decode_seconds_per_token)
    return min(seconds)


class _Clock:
    """A stopping criterion that records the time of each token and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, _scores: object, **_options: object) -> torch.Tensor:
        int(input_ids[0, -1])  # waits for the device
        self.times.append(perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def their_seconds_per_token(model: Any, prompt: np.ndarray, tokens: int = _TOKENS, **options: object) -> float:
    """Return the seconds per token of transformers' greedy `generate`: the fastest of three texts; one may compile."""
    ids = torch.from_numpy(prompt)[None].to(model.device)
    seconds = []
    for _ in range(3):
        clock = _Clock()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]), **options,
        )  # fmt: skip
        seconds.append((clock.times[-1] - clock.times[0]) / (len(clock.times) - 1))
    return min(seconds)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("model", type=Path, nargs="?")
    model.add_argument("--random", choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--compile", action="store_true", help="also time the compiled forward, on a CPU")
    parser.add_argument("--recorded", action="store_true", help="also time CUDA graphs; on a CPU, their fixed shapes")
    parser.add_argument("--transformers", action="store_true", help="also time plain decoding and transformers")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Print a table or JSON."""
    given = parsed()
    if given.random:
        model = random_llama(given.random, DTYPES[given.dtype], given.device)
    else:
        model = load_model(str(given.model), given.dtype, given.device)
    targets = {"eager": TorchTarget(model)}
    if given.compile:
        compile_forward(model, cache_folder())
        targets["compiled"] = TorchTarget(model, kept_forward(model))
    if given.recorded:
        targets["recorded"] = TorchTarget(model, recordings=RecordedForward(model))
    bandwidth, size = copy_bandwidth(model.device), weight_bytes(model)
    limit = size / bandwidth
    passes = [
        {"forward": name, **each, "times_the_limit": each["seconds"] / limit}
        for name, target in targets.items()
        for each in timed_passes(target, given.rows, given.context)
    ]
    texts = {}
    if given.transformers:
        prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, given.context)
        texts = {f"foredraft, {name}": our_seconds_per_token(target, prompt) for name, target in targets.items()}
        texts["transformers, eager"] = their_seconds_per_token(model, prompt)
        texts["transformers, static cache"] = their_seconds_per_token(model, prompt, cache_implementation="static")
    if given.json:
        found = {"bandwidth": bandwidth, "weight_bytes": size, "limit_seconds": limit, "passes": passes}
        print(json.dumps({**found, "seconds_per_token": texts}))
        return
    print(f"{size / 1e6:,.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s of copying: {1e3 * limit:.2f} ms")
    for each in passes:
        busy = "" if each["busy_seconds"] is None else f", the device busy for {1e3 * each['busy_seconds']:.2f} ms"
        print(
            f"{each['rows']:4} rows, {each['forward']:8} {1e3 * each['seconds']:8.2f} ms, "
            f"{each['times_the_limit']:.2f} times the limit{busy}"
        )
    for name, seconds in texts.items():
        print(f"{1e3 * seconds:8.2f} ms per token: {name}")


if __name__ == "__main__":
    main()
