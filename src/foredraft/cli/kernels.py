"""Compiles the numba kernels of a first text in a process of its own, while the model is loaded.

`python -m foredraft.cli.kernels DTYPE` is that process; it shares numba's cache on disk. This only saves time: what was
not compiled is compiled when it is needed.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_TOKENS = 24  # of an artificial text: steps with accepted, rejected and no drafts (chosen)


@contextmanager
def compiled_beside(dtype: str, tell: Callable[[float, str], None]) -> Iterator[None]:
    """Compile beside the block, and wait at its end, unless numba's cache has kernels already.

    `dtype` is of the logits; "auto" and those that round mean bfloat16.
    """
    from foredraft.model.rounded import KINDS

    folder = os.environ.get("NUMBA_CACHE_DIR")  # set by the package if the user does not
    if folder is None or any(Path(folder).rglob("*.nbi")):
        yield
        return
    command = [sys.executable, "-m", "foredraft.cli.kernels", "bfloat16" if dtype in {"auto", *KINDS} else dtype]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603  # our own
    try:
        yield
        tell(0.0, "compiling (once)")
        process.wait()
    finally:
        process.terminate()  # does nothing to one that has ended
        process.wait()


def compile_kernels(dtype: str) -> None:
    """Decode a greedy and a sampled text of an artificial model with `auto`; `dtype` is of its logits."""
    from dataclasses import replace
    from typing import Any

    import numpy as np
    import torch

    from foredraft.contracts import CostCurve, Scores
    from foredraft.control import MeasuredControl
    from foredraft.drafters import Resources, make_drafter
    from foredraft.sampling import SamplingOptions
    from foredraft.testing import ToyTarget
    from foredraft.testing.recording import begun, written

    class Target(ToyTarget):
        def forward(self, *given: Any, **options: Any) -> Scores:
            scores = super().forward(*given, **options)
            return replace(scores, logits=scores.logits.to(getattr(torch, dtype, torch.float32)))

    target = Target()
    drafter = make_drafter("auto", {"table": "none"}, Resources(target.vocabulary))
    for sampling in (SamplingOptions(), SamplingOptions(do_sample=True)):
        run = begun(drafter, np.arange(1, 9) % 4, sampling, new_tokens=_TOKENS)
        run.target, run.control = target, MeasuredControl(CostCurve((1, 8), (1.0, 1.0)))
        written(run)


if __name__ == "__main__":
    compile_kernels(sys.argv[1])
