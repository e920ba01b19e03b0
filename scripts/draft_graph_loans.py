"""Measure merging in draft graphs: drafted nodes, and the KL divergence of reused distributions from the true ones.

Corresponds to GSD's table 1 (drafted tokens) and table 5 (KL divergence), Gong et al. 2024. A text written by the
target is drafted again from its positions in every shape. A loan is the reuse, by a node (the borrower), of the
continuation of an earlier node with the same last tokens (the lender).

    python scripts/draft_graph_loans.py DRAFT_MODEL --model MODEL --data PROMPTS --task gsm8k
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foredraft.api import Generator, load
from foredraft.bench.tasks import TaskPrompt, load_tasks
from foredraft.contracts import Budget, SequenceView, TokenIds
from foredraft.graph.dag import DraftGraph
from foredraft.graph.tree import depths
from foredraft.model.candidates import Imitation
from foredraft.model.gguf.files import SMOLLM2
from foredraft.model.growth import GrowthRules, Rollout, RolloutDrafting
from foredraft.model.target import TorchTarget
from foredraft.pairing import pair_draft_model
from tables import markdown_table

TAUS = (1, 2, 3, 4)
_MOST_LOANS = 32
"""Maximum number of loans of a draft that are recomputed: the first ones. Chosen; drafts with more are rare."""
_MOST_ROWS = 256
"""Maximum number of rows that the draft model computes for a draft. Chosen."""
_ROOM = _MOST_ROWS + 2 * _MOST_LOANS
"""Rows of the draft, then the recomputed rows: borrowers and lenders."""


@dataclass(frozen=True, slots=True)
class Loans:
    """Figures of one shape over all drafts.

    Attributes:
        shape: "chain", "tree", or "graph, tau 2".
        drafts: number of drafts.
        nodes: drafted tokens per draft; reused ones are not drafted.
        passes: rows computed by the draft model per draft, including the root's.
        depth: levels per draft.
        unpruned: nodes per draft of the tree of equal depth without pruning and merging.
        redundant: share of the drafted tokens that are borrowers.
        recomputed: number of compared distributions.
        divergence: mean KL divergence, in nats, of the distribution after the lender from that after the borrower.
        agreement: share of borrowers with the same most probable next token as the lender.
    """

    shape: str
    drafts: int
    nodes: float
    passes: float
    depth: float
    unpruned: float
    redundant: float
    recomputed: int
    divergence: float
    agreement: float


_Sums = defaultdict[str, float]
"""Sums over all drafts of one shape, by the names of the fields of `Loans`."""


def measure_loans(
    generator: Generator,
    draft_model: Any,
    prompts: Sequence[TaskPrompt],
    *,
    tokens: int,
    every: int = 4,
) -> list[Loans]:
    """Let the target write a greedy text for each prompt, and draft from its positions.

    Args:
        generator: with the method `none`.
        draft_model: as `draft_graph` takes it.
        prompts: the prompts.
        tokens: maximum number of tokens of each text.
        every: draft from every n-th position.
    """
    rules = GrowthRules()  # the paper's defaults; the chain uses their levels and probability
    model = pair_draft_model(draft_model, generator.target, generator.tokenizer)
    shapes = {"chain": replace(rules, out_degree=1, least_share=0.0, tau=0), "tree": replace(rules, tau=0)}
    shapes |= {f"graph, tau {tau}": replace(rules, tau=tau) for tau in TAUS}
    sums = {shape: _Sums(float) for shape in shapes}
    for prompt in prompts:
        text = generator.generate(prompt.prompt(), max_new_tokens=tokens)
        ids = np.concatenate([generator.encode(prompt.prompt()), np.array(text.token_ids, np.int64)])
        ends = range(len(ids) - len(text.token_ids), len(ids), every)
        for shape, shape_rules in shapes.items():
            _draft_along(model, ids, ends, shape_rules, rules.out_degree, sums[shape])
    return [_loans(shape, found) for shape, found in sums.items()]


@torch.inference_mode()
def _draft_along(
    model: TorchTarget, ids: TokenIds, ends: Sequence[int], rules: GrowthRules, out_degree: int, sums: _Sums
) -> None:
    imitation = Imitation(vocabulary=model.vocabulary, ids=model.ids)
    drafting = RolloutDrafting(Rollout(model, _ROOM), rules, imitation)
    for end in ends:
        drafting.propose(SequenceView(ids[:end], 0), Budget(nodes=_MOST_ROWS, depth=rules.levels))
        graph = drafting.graph
        if graph is None:
            raise ValueError("The draft model's window is full, or it does not know all ids of the text.")
        size = graph.size
        levels = int(depths(graph.parents[:size]).max(initial=0))
        sums["drafts"] += 1
        sums["nodes"] += size
        sums["passes"] += 1 + int((drafting.rows[:size] >= 0).sum())
        sums["depth"] += levels
        sums["unpruned"] += sum(out_degree**level for level in range(1, levels + 1))
        sums["redundant"] += int((graph.lenders[:size] >= 0).sum())
        _compare(drafting, graph, sums)


def _compare(drafting: RolloutDrafting, graph: DraftGraph, sums: _Sums) -> None:
    """Compare the distributions after borrowers, computed from their own prefix, with those after their lenders."""
    lenders = graph.lenders[: graph.size]
    borrowers = [node for node in np.flatnonzero(lenders >= 0) if drafting.rows[lenders[node]] >= 0][:_MOST_LOANS]
    if not borrowers:
        return
    nodes = np.array([*borrowers, *lenders[borrowers]], np.int32)
    above = graph.parents[nodes]
    rows = np.where(above < 0, -1, drafting.rows[above]).astype(np.int32)
    own, lent = drafting.rollout.expand(graph.tokens[nodes], rows).float().log_softmax(-1).chunk(2)
    sums["recomputed"] += len(borrowers)
    sums["divergence"] += float((own.exp() * (own - lent)).sum())
    sums["agreement"] += int((own.argmax(-1) == lent.argmax(-1)).sum())


def _loans(shape: str, sums: _Sums) -> Loans:
    drafts, nodes, compared = (max(sums[name], 1.0) for name in ("drafts", "nodes", "recomputed"))
    return Loans(
        shape=shape,
        drafts=int(sums["drafts"]),
        nodes=sums["nodes"] / drafts,
        passes=sums["passes"] / drafts,
        depth=sums["depth"] / drafts,
        unpruned=sums["unpruned"] / drafts,
        redundant=sums["redundant"] / nodes,
        recomputed=int(sums["recomputed"]),
        divergence=sums["divergence"] / compared,
        agreement=sums["agreement"] / compared,
    )


def main() -> None:
    """Print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft_model", help="a hub id, a folder, a GGUF file")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--data", type=Path, help="folder of the tasks' files")
    parser.add_argument("--task", action="append", help="a task; repeatable")
    parser.add_argument("--prompts", type=int, default=10, help="per task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    prompts = load_tasks(given.task, given.data, given.prompts)
    generator = load(given.model, method="none", dtype=given.dtype)
    found = measure_loans(generator, given.draft_model, prompts, tokens=given.max_new_tokens)
    if given.json:
        print(json.dumps([asdict(each) for each in found]))
        return
    rows = [[value if isinstance(value, str) else f"{value:.3g}" for value in asdict(each).values()] for each in found]
    print(markdown_table(list(asdict(found[0])), rows))


if __name__ == "__main__":
    main()
