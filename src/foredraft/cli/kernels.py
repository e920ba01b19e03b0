"""Compiles the numba kernels of a first text in processes of their own, while the model is loaded.

`python -m foredraft.cli.kernels PART` is one of them; they share numba's cache on disk. This only saves time:
what was not compiled is compiled when it is needed.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTS = ("drafting", "steps")  # compiled beside each other; drafting takes 11 s and steps 9 on 2 cores
_TOKENS = 24  # of an artificial text: steps with accepted, rejected and no drafts (chosen)


@contextmanager
def compiled_beside(tell: Callable[[float, str], None]) -> Iterator[None]:
    """Compile beside the block, and wait at its end, unless numba's cache has kernels already."""
    folder = os.environ.get("NUMBA_CACHE_DIR")  # set by the package if the user does not
    if folder is None or any(Path(folder).rglob("*.nbi")):
        yield
        return
    commands = [[sys.executable, "-m", "foredraft.cli.kernels", part] for part in PARTS]
    nothing = subprocess.DEVNULL
    processes = [subprocess.Popen(each, stdout=nothing, stderr=nothing) for each in commands]  # noqa: S603  # our own commands
    try:
        yield
        tell(0.0, "compiling (once)")
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.terminate()  # does nothing to one that has ended
            process.wait()


def compile_drafting() -> None:
    """Draft as `auto` does for greedy and for sampled texts, without a model."""
    import numpy as np

    from foredraft.contracts import Budget, DraftContext, SequenceView, Verdict
    from foredraft.drafters import Resources, make_drafter

    drafter, ids = make_drafter("auto", {"table": "none"}, Resources(4)), np.arange(_TOKENS) % 4
    ids.flags.writeable = False  # as a text's are
    for sampled in (False, True):
        drafting = drafter.open(DraftContext(4, settings={"do_sample": sampled}))
        draft = drafting.propose(SequenceView(ids[:-1], 1), Budget(8, 8))
        tokens = np.zeros((len(draft) + 1, drafter.needs.top_k), np.int32)
        drafting.observe(Verdict((int(ids[-1]),), (), draft, len(ids) - 2, tokens, tokens.astype(np.float32)))
        drafting.propose(SequenceView(ids, 1), Budget(8, 8))
        drafting.close()


def compile_steps() -> None:
    """Decode a greedy and a sampled text of an artificial model, drafted by `prompt_lookup`."""
    from dataclasses import replace

    import numpy as np
    import torch

    from foredraft.contracts import TOP, CostCurve, Scores
    from foredraft.control import MeasuredControl
    from foredraft.drafters import Resources, make_drafter
    from foredraft.model.kv_cache import move_rows
    from foredraft.sampling import SamplingOptions
    from foredraft.sampling.logits import block_maxima, top_by_blocks
    from foredraft.testing import ToyTarget
    from foredraft.testing.recording import begun, written

    class Target(ToyTarget):
        def forward(self, *given: Any, **options: Any) -> Scores:
            scores = super().forward(*given, **options)
            logits = scores.logits
            top_by_blocks(logits, block_maxima(logits), logits.logsumexp(-1))  # as of compiled passes
            return scores

    target = Target()
    drafter = make_drafter("prompt_lookup", {}, Resources(target.vocabulary))
    drafter.needs = replace(drafter.needs, top_k=TOP)  # as auto's
    for sampling in (SamplingOptions(), SamplingOptions(do_sample=True)):
        run = begun(drafter, np.arange(1, 9) % 4, sampling, new_tokens=_TOKENS)
        run.target, run.control = target, MeasuredControl(lambda: CostCurve((1, 8), (1.0, 1.0)))
        written(run)
    move_rows(torch.zeros(1, 1, 2, 2), 0, np.array([1]))  # of a draft that was accepted, but for its first node


def _compile(part: str) -> None:
    """Compile one of the `PARTS`; numba chooses the names of its files in a way that allows one process at a time."""
    from unittest.mock import patch

    from filelock import FileLock
    from numba.core.caching import IndexDataCacheFile

    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    theirs, lock = IndexDataCacheFile.save, FileLock(folder / "kernels.lock")

    def save(*given: Any) -> None:
        with lock:
            theirs(*given)  # type: ignore[no-untyped-call]  # numba leaves it without annotations

    with patch.object(IndexDataCacheFile, "save", save):
        if part == PARTS[0]:
            compile_drafting()
        else:
            compile_steps()


if __name__ == "__main__":
    _compile(*sys.argv[1:])
