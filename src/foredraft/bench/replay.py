"""Replay: runs a drafter on a recorded text, without a model.

At each step, the drafted tokens that match the recorded answer are accepted. Does not depend on any drafter.
"""

from collections.abc import Iterator
from time import perf_counter_ns

import numpy as np

from foredraft.contracts import Budget, DraftContext, Drafter, SequenceView, TokenIds, Verdict
from foredraft.control import cut
from foredraft.graph.tree import ROOT


def replay_steps(
    drafter: Drafter, prompt: TokenIds, output: TokenIds, nodes: int, vocabulary: int
) -> Iterator[tuple[Verdict, int]]:
    """Yield each step's verdict and the nanoseconds of its `propose`; ValueError for a draft that is not a tree."""
    ids = np.concatenate([prompt, output])
    ids.flags.writeable = False
    drafting = drafter.open(DraftContext(vocabulary, seed=0, max_nodes=nodes))
    length = len(prompt)
    try:
        while length < len(ids):
            budget = Budget(nodes, len(ids) - length - 1)
            start = perf_counter_ns()
            draft = drafting.propose(SequenceView(ids[:length], len(prompt)), budget)
            elapsed = perf_counter_ns() - start
            draft = cut(draft, budget)
            draft.check()
            child_of, path, node = draft.child_of(), list[int](), ROOT
            for token in ids[length:].tolist():
                if (child := child_of.get((node, token))) is None:
                    break
                path.append(child)
                node = child
            emitted = tuple(ids[length : length + len(path) + 1].tolist())
            verdict = Verdict(emitted, tuple(path), draft, length - 1)
            length += len(emitted)
            drafting.observe(verdict)
            yield verdict, elapsed
    finally:
        drafting.close()
