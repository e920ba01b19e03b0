"""Time forward passes by rows against the time that reading the weights takes at this machine's copy bandwidth.

A model with random weights will do, as `scripts/random_model.py` makes one: speed does not depend on what they are.

    python scripts/forward_against_bandwidth.py FOLDER [--device cuda] [--context 1024] [--compile]
"""

import argparse
import json
from pathlib import Path
from time import perf_counter

import torch

from foredraft.cache_folder import cache_folder
from foredraft.model.compiled import kept_forward
from foredraft.model.compiling import compile_forward
from foredraft.model.cost import measure_cost
from foredraft.model.loading import load_model
from foredraft.model.target import TorchTarget

_COPIED = 2**29
_REPEATS = 8


def copy_bandwidth(device: torch.device, size: int = _COPIED) -> float:
    """Return the bytes a second, read and written together, of the quickest plain copy of `size` bytes."""
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
    """Return the bytes of the weights that a pass reads; of an embedding that is not tied, it reads only a few rows."""
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
    every = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return every if tied else every - embedding.numel() * embedding.element_size()


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--compile", action="store_true", help="compile the forward first, on a CPU")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    model = load_model(str(given.model), given.dtype, given.device)
    if given.compile:
        compile_forward(model, cache_folder())
    target = TorchTarget(model, kept_forward(model) if given.compile else None)
    bandwidth, size = copy_bandwidth(target.device), weight_bytes(model)
    limit = size / bandwidth
    curve = measure_cost(target, tuple(given.rows), seconds=5.0, context=given.context)
    rows = [
        {"rows": count, "milliseconds": 1e3 * seconds, "times_the_limit": seconds / limit}
        for count, seconds in zip(curve.rows, curve.seconds, strict=True)
    ]
    found = {"bandwidth_gb_s": bandwidth / 1e9, "weights_mb": size / 1e6, "limit_ms": 1e3 * limit, "passes": rows}
    if given.json:
        print(json.dumps(found))
        return
    print(f"{size / 1e6:,.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s of copying: {1e3 * limit:.2f} ms")
    for row in rows:
        print(f"{row['rows']:4} rows {row['milliseconds']:8.2f} ms  {row['times_the_limit']:.2f} times the limit")


if __name__ == "__main__":
    main()
