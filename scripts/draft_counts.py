"""Show what becomes of drafts, by depth, source and estimated acceptance, and the time of a step's parts.

python scripts/draft_counts.py --method auto --method prompt_lookup --task embedded/code
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import typer

from foredraft.bench.method import chosen_methods
from foredraft.bench.tasks import load_tasks
from foredraft.cli import flags
from foredraft.cli.job import load_plain, setting
from foredraft.cli.screen import show_json, show_table, working
from foredraft.contracts import Verdict
from foredraft.graph.tree import depths
from foredraft.model.gguf.files import SMOLLM2
from foredraft.testing.recording import Recorder

BINS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # bin edges of estimated acceptance (chosen; most are near 0)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Numbers of verified and accepted nodes of one or more texts, by depth (from 1) and by source.

    `estimated` has for each bin the number of verified nodes, the sum of their estimates, and the number accepted; it
    is zero, or empty, if the drafter gives no estimates.
    """

    drafted_by_depth: list[int]
    accepted_by_depth: list[int]
    drafted_by_source: dict[str, int]
    accepted_by_source: dict[str, int]
    estimated: list[list[float]]

    @property
    def reliability(self) -> list[dict[str, float]]:
        """The bins with nodes: edges, nodes, mean estimate, and share accepted, which equals it if calibrated."""
        return [
            {"low": low, "high": high, "nodes": int(nodes), "estimate": estimates / nodes, "accepted": accepted / nodes}
            for (low, high), (nodes, estimates, accepted) in zip(pairwise(BINS), self.estimated, strict=False)
            if nodes
        ]


def count_drafts(verdicts: Iterable[Verdict], names: Sequence[str]) -> DraftCounts:
    """Count the nodes of verdicts; `names` are the drafter's source names."""
    drafted, accepted, drafted_by, accepted_by = Counter[int](), Counter[int](), Counter[str](), Counter[str]()
    estimated = np.zeros((len(BINS) - 1, 3))
    for verdict in verdicts:
        draft, path = verdict.draft, list(verdict.path)
        drafted.update(depths(draft.parents).tolist())
        accepted.update(range(1, len(path) + 1))
        sources = [names[number] for number in ([0] * len(draft) if draft.source is None else draft.source.tolist())]
        drafted_by.update(sources)
        accepted_by.update(sources[node] for node in path)
        if draft.score is not None:
            bins = np.clip(np.searchsorted(BINS, draft.score, side="right") - 1, 0, len(BINS) - 2)
            np.add.at(estimated[:, 0], bins, 1.0)
            np.add.at(estimated[:, 1], bins, draft.score)
            np.add.at(estimated[:, 2], bins[path], 1.0)
    by_depth = range(1, max(drafted, default=0) + 1)
    counts = [drafted[depth] for depth in by_depth], [accepted[depth] for depth in by_depth]
    return DraftCounts(*counts, dict(drafted_by), dict(accepted_by), estimated.tolist())


def main(
    data: flags.DataOption = None,
    model: flags.ModelOption = SMOLLM2,
    task: flags.TaskOption = None,
    method: flags.MethodsOption = None,
    prompts: flags.PromptsOption = 10,
    max_new_tokens: flags.TokensOption = 128,
    temperature: flags.TemperatureOption = 0.0,
    dtype: flags.DtypeOption = "auto",
    eager: flags.EagerOption = False,
    as_json: flags.JsonOption = False,
) -> None:
    """Draft texts with each method, and show its accepted nodes and the milliseconds per token of a step's parts."""
    methods = chosen_methods(method or ["prompt_lookup", "auto"])
    settings, chosen = setting(temperature, max_new_tokens=max_new_tokens), load_tasks(task, data, prompts)
    found = []
    with working("drafting") as tell:
        generator = load_plain(model, dtype, eager, tell)
        for each in methods:
            tell(len(found) / len(methods), "drafting")
            generator.use(**each.drafting)
            recorder, verdicts, times, emitted = Recorder(generator.drafter), list[Verdict](), Counter[str](), 0
            generator.attach(each.method, recorder, **each.amount)
            for prompt in chosen:
                text = generator.generate(prompt.input(generator.tokenizer), **settings, seed=prompt.number)
                verdicts += recorder.verdicts
                emitted += len(text.token_ids)
                for step in text.steps:
                    times.update(step.nanoseconds)
            counts = count_drafts(verdicts, recorder.source_names)
            parts = {part: time / 1e6 / emitted for part, time in times.items()}
            figures = {**asdict(counts), "reliability": counts.reliability, "milliseconds": parts}
            found.append({"method": each.label, "emitted": emitted, "steps": len(verdicts), **figures})
    if as_json:
        show_json(found)
        return
    for each in found:
        accepted = each["accepted_by_source"]
        levels = enumerate(zip(each["drafted_by_depth"], each["accepted_by_depth"], strict=True), 1)
        sources = [(name, count, accepted.get(name, 0)) for name, count in each["drafted_by_source"].items()]
        bins = [(f"{low:g} to {high:g}", *rest) for low, high, *rest in map(dict.values, each["reliability"])]
        show_table(("depth", "drafted", "accepted"), [(depth, *nodes) for depth, nodes in levels], each["method"])
        show_table(("source", "drafted", "accepted"), sources)
        show_table(("estimate", "nodes", "mean estimate|.3f", "accepted|.3f"), bins)
        show_table(("part", "ms / token|.3f"), list(each["milliseconds"].items()))


if __name__ == "__main__":
    typer.run(main)
