"""Compiles the numba kernels of the first text in two processes; `python -m foredraft.cli.kernels DTYPE` is the second.

The second process compiles layout, verification and control, while the first one compiles the drafter's kernels; they
share numba's cache on disk. This only saves time. Does not depend on which method drafts.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foredraft.api import Generator


def begin_compiling(dtype: str) -> "subprocess.Popen[bytes] | None":
    """Start the second process, unless numba's cache has kernels already; "auto" and rounded weights mean bfloat16."""
    from foredraft.model.rounded import KINDS

    folder = os.environ.get("NUMBA_CACHE_DIR")  # set by the package if the user does not
    if folder is None or any(Path(folder).rglob("*.nbi")):
        return None
    precision = "bfloat16" if dtype in {"auto", *KINDS} else dtype
    command = [sys.executable, "-m", "foredraft.cli.kernels", precision]
    return subprocess.Popen(  # noqa: S603  # this interpreter and our own module
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def compile_step(dtype: str) -> None:
    """Run layout, verification and control on artificial logits of a dtype, which compiles them."""
    import numpy as np
    import torch

    from foredraft.contracts import Budget, CostCurve, Draft, Scores, Verdict
    from foredraft.control.measured import MeasuredControl
    from foredraft.engine.step import check_draft
    from foredraft.graph.layout import lay_out
    from foredraft.graph.tree import ROOT, child_with
    from foredraft.index.own_words import TOP
    from foredraft.sampling import SamplingOptions
    from foredraft.sampling.chooser import Sampler
    from foredraft.sampling.logits import top_probabilities

    logits = torch.zeros((3, 512), dtype=getattr(torch, dtype, torch.float32))
    nodes = np.arange(2, dtype=np.int32)
    draft = Draft(nodes.copy(), nodes - 1, np.ones(len(nodes), np.float32), source=np.zeros(len(nodes), np.uint8))
    sampler = Sampler(SamplingOptions(do_sample=True, temperature=1.0), (), lambda: np.zeros(1, np.int64))
    scores, control = Scores(logits), MeasuredControl(CostCurve((1, 8), (1.0, 1.0)))
    check_draft(draft, 512, 1)
    draft = control.trim(draft, Budget(len(draft), len(draft)))
    lay_out(0, draft.tokens, draft.parents, 1)
    child_with(draft.tokens, draft.parents, ROOT, sampler.chooser(scores, 1)(0, []))
    top_probabilities(logits, TOP, np.arange(3, dtype=np.int32))
    control.observe(Verdict((0,), (), draft, 1), 1.0, 0.0)


def compile_drafting(generator: "Generator") -> None:
    """Call the drafter on an artificial text, unless it drafts with a model."""
    import numpy as np

    from foredraft.contracts import Budget, DraftContext, SequenceView
    from foredraft.engine.guard import GuardedDrafter

    if generator.drafter.needs.hidden or generator.drafter.needs.target:
        return
    drafting = GuardedDrafter(generator.drafter).open(DraftContext(generator.target.vocabulary))
    ids = np.arange(1, 9) % 4
    ids.flags.writeable = False
    drafting.propose(SequenceView(ids, len(ids)), Budget(8, 8))
    drafting.close()


if __name__ == "__main__":
    compile_step(sys.argv[1])
