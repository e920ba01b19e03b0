"""Compiles the numba kernels of the first text in processes of their own, while the model is loaded or compiled.

One compiles layout, verification and control, the other those of the drafting method `auto`; they share numba's cache
on disk. `python -m foredraft.cli.kernels NAME` is one of them. This only saves time: what was not compiled is compiled
when it is needed.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_VOCABULARY = 512  # of the artificial model; any number
_DRAFTING = "drafting"


@contextmanager
def compiled_beside(dtype: str, *, drafting: bool, skip: bool = False) -> Iterator[Callable[[], bool]]:
    """Compile beside the block, unless numba's cache has kernels already, or `skip` says not to.

    What is yielded waits until all is compiled, and returns whether something was not compiled yet. `dtype` is of the
    logits; "auto" and those that round mean bfloat16. `drafting` says whether `auto` drafts.
    """
    from foredraft.model.rounded import KINDS

    folder = os.environ.get("NUMBA_CACHE_DIR")  # set by the package if the user does not
    precision = "bfloat16" if dtype in {"auto", *KINDS} else dtype
    names = [precision, _DRAFTING] if drafting else [precision]
    if skip or folder is None or any(Path(folder).rglob("*.nbi")):
        names = []
    processes = [
        subprocess.Popen(  # noqa: S603  # this interpreter and our own module
            [sys.executable, "-m", "foredraft.cli.kernels", name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for name in names
    ]

    def wait() -> bool:
        running = any(process.poll() is None for process in processes)
        for process in processes:
            process.wait()
        return running

    try:
        yield wait
    finally:
        for process in processes:
            process.terminate()  # does nothing to one that has ended
        wait()


def compile_step(dtype: str) -> None:
    """Run layout, verification and control on artificial logits of a dtype, which compiles them."""
    import numpy as np
    import torch

    from foredraft.contracts import Budget, CostCurve, Draft, Scores, Verdict
    from foredraft.control.measured import MeasuredControl
    from foredraft.graph.layout import lay_out
    from foredraft.graph.tree import ROOT, child_with
    from foredraft.index.own_words import TOP
    from foredraft.sampling import SamplingOptions
    from foredraft.sampling.chooser import Sampler
    from foredraft.sampling.logits import top_probabilities

    logits = torch.zeros((3, _VOCABULARY), dtype=getattr(torch, dtype, torch.float32))
    nodes = np.arange(2, dtype=np.int32)
    draft = Draft(nodes.copy(), nodes - 1, np.ones(len(nodes), np.float32), source=np.zeros(len(nodes), np.uint8))
    sampler = Sampler(SamplingOptions(do_sample=True, temperature=1.0))
    scores, control = Scores(logits), MeasuredControl(CostCurve((1, 8), (1.0, 1.0)))
    draft.check(_VOCABULARY, 1)
    draft = control.trim(draft, Budget(len(draft), len(draft)))
    lay_out(0, draft.tokens, draft.parents, 1)
    child_with(draft.tokens, draft.parents, ROOT, sampler.chooser(scores, 1)(0, []))
    top_probabilities(logits, TOP, np.arange(3, dtype=np.int32))
    control.observe(Verdict((0,), (), draft, 1), 1.0, 0.0)


def compile_drafting() -> None:
    """Have `auto` draft for an artificial text."""
    import numpy as np

    from foredraft.contracts import Budget, DraftContext, SequenceView
    from foredraft.drafters import Resources, make_drafter

    drafting = make_drafter("auto", {"table": "none"}, Resources(_VOCABULARY)).open(DraftContext(_VOCABULARY))
    ids = np.arange(1, 9) % 4
    ids.flags.writeable = False
    drafting.propose(SequenceView(ids, len(ids)), Budget(8, 8))
    drafting.close()


if __name__ == "__main__":
    compile_drafting() if sys.argv[1] == _DRAFTING else compile_step(sys.argv[1])
