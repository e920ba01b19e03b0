"""What cells add up to: a row of figures for each setting, task and method, micro and macro, with intervals.

Every figure is worked out from the cells anew, none is stored.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from foredraft.bench.cell import Cell, Writing, check_alike
from foredraft.bench.drafts import DraftCounts, Reliability, add_counts
from foredraft.bench.metrics import LOOP_SHARE, Ratio, finite, mean, mean_speed_up, speed_up
from foredraft.engine.statistics import Statistics, add_up

ALL = "all"
"""The row over all tasks."""

PARTS = ("draft", "forward", "verify", "commit", "other")

Rows = tuple[list[str], list[list[str]]]
"""Headings and rows of a table."""

_DEPTHS = 8  # of which a table shows the share of steps that reached them


@dataclass(frozen=True, slots=True)
class Summary:
    """One method on one task in one setting.

    Attributes:
        settings: as `settings_name` words them.
        task: its name, or `all`.
        method: the label.
        texts: pairs that were written.
        failed: cells whose method raised.
        stalled: share of the decode time for which the machine held passes up; it is in no other figure.
        identical: texts that are plain decoding's.
        statistics: the counts added up, and their rates: the micro average.
        tokens_per_target_step_macro: mean over texts.
        speed_up: of the sums: decode time a token, plain over own; for the peer, all its time.
        speed_up_macro: geometric mean over texts.
        speed_up_without_loops: of the sums, over the texts whose plain output does not loop.
        texts_without_loops: how many those are.
        repeated: mean share of repeated 8-grams in the output.
        milliseconds: of an emitted token, by part.
        counts: what became of the drafts.
        whole_time: whether times are whole calls, prefill included, which is all the peer tells.
    """

    settings: str
    task: str
    method: str
    texts: int
    failed: int
    stalled: float
    identical: int
    statistics: Statistics
    tokens_per_target_step_macro: float
    speed_up: Ratio
    speed_up_macro: Ratio
    speed_up_without_loops: Ratio
    texts_without_loops: int
    repeated: float
    milliseconds: Mapping[str, float]
    counts: DraftCounts
    whole_time: bool

    @property
    def nodes_per_step(self) -> float:
        """Drafted tokens a target step."""
        return self.statistics.drafted / max(self.statistics.steps, 1)

    @property
    def reached(self) -> tuple[float, ...]:
        """Of all target steps, the share that accepted at least 1, 2, ... drafted tokens."""
        return tuple(count / max(self.statistics.steps, 1) for count in self.counts.accepted_by_depth)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, for JSON; None where there is nothing to tell."""
        figures = asdict(self)
        figures |= figures.pop("counts")
        del figures["estimated"]
        figures |= {"nodes_per_step": self.nodes_per_step, "reached": self.reached}
        figures["statistics"] = self.statistics.as_dict()
        figures["reliability"] = [asdict(each) for each in self.counts.reliability]
        for name in ("speed_up", "speed_up_macro", "speed_up_without_loops"):
            figures[name] = {key: finite(value) for key, value in figures[name].items()}
        return {name: finite(value) if isinstance(value, float) else value for name, value in figures.items()}


def summarize_cells(cells: Iterable[Cell]) -> list[Summary]:
    """Return a summary for each setting, method and task, and one over all tasks where there are several.

    Raises:
        UsageError: the cells are of unlike environments.
    """
    cells = list(cells)
    check_alike(cells)
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    whole: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.place.settings, cell.place.method, cell.place.task), []).append(cell)
        whole.setdefault((cell.place.settings, cell.place.method, ALL), []).append(cell)
    several = len({task for _, _, task in groups}) > 1
    return [_summary(*key, group) for key, group in (groups | (whole if several else {})).items()]


def overall(summaries: Sequence[Summary]) -> list[Summary]:
    """Return each method's row over all tasks, or over the only one."""
    return [each for each in summaries if each.task == ALL] or list(summaries)


def _summary(settings: str, method: str, task: str, group: Sequence[Cell]) -> Summary:
    pairs = [cell.whole for cell in group if cell.whole is not None]
    own = [writing for _, writing in pairs]
    whole_time = any(not writing.parts for writing in own)
    calm = [pair for pair in pairs if pair[0].repeated <= LOOP_SHARE]
    tokens = max(sum(len(writing.token_ids) for writing in own), 1)
    stalled = sum(writing.stalled_seconds for writing in own)
    statistics = add_up([writing.statistics for writing in own])
    return Summary(
        settings=settings,
        task=task,
        method=method,
        texts=len(pairs),
        failed=sum(bool(cell.failure) for cell in group),
        stalled=stalled / max(stalled + statistics.decode_seconds, 1e-9),
        identical=sum(base.token_ids == writing.token_ids for base, writing in pairs),
        statistics=statistics,
        tokens_per_target_step_macro=mean(writing.statistics.tokens_per_target_step for writing in own),
        speed_up=_micro(pairs, whole_time),
        speed_up_macro=_macro(pairs, whole_time),
        speed_up_without_loops=_micro(calm, whole_time),
        texts_without_loops=len(calm),
        repeated=mean(writing.repeated for writing in own),
        milliseconds={part: 1e3 * sum(each.parts.get(part, 0.0) for each in own) / tokens for part in PARTS},
        counts=add_counts([cell.counts for cell in group if cell.counts is not None]),
        whole_time=whole_time,
    )


def _seconds(writing: Writing, whole_time: bool) -> float:
    return writing.total_seconds if whole_time else writing.statistics.decode_seconds


def _micro(pairs: Sequence[tuple[Writing, Writing]], whole_time: bool) -> Ratio:
    figures = [[(_seconds(each, whole_time), len(each.token_ids)) for each in pair] for pair in pairs]
    base, own = np.array(figures, np.float64).reshape(-1, 2, 2).transpose(1, 2, 0)
    return speed_up(*base, *own)


def _macro(pairs: Sequence[tuple[Writing, Writing]], whole_time: bool) -> Ratio:
    a_token = [[_seconds(each, whole_time) / max(len(each.token_ids), 1) for each in pair] for pair in pairs]
    return mean_speed_up(np.array([base / own for base, own in a_token], np.float64))


# --- tables


def table(summaries: Iterable[Summary], columns: Mapping[str, str]) -> Rows:
    """Return a row for each summary; `columns` are names of the figures of `shown`, and their headings."""
    rows = [shown(each) for each in summaries]
    return list(columns.values()), [[row[name] for name in columns] for row in rows]


def shown(each: Summary) -> dict[str, str]:
    """Return a row's figures as texts; `-` where there is nothing to tell."""
    counts, drafts = each.statistics, each.statistics.drafted > 0
    draft, forward = each.milliseconds["draft"], each.milliseconds["forward"]
    split = draft, forward, sum(each.milliseconds.values()) - draft - forward
    return {
        "method": each.method,
        "task": each.task,
        "texts": f"{each.texts} ({each.failed} failed)" if each.failed else str(each.texts),
        "speed_up": _told(each.speed_up),
        "speed_up_without_loops": f"{_told(each.speed_up_without_loops)} ({each.texts_without_loops})",
        "speed_up_macro": _told(each.speed_up_macro),
        "reached": " ".join(f"{share:.2f}" for share in each.reached[:_DEPTHS]) or "-",
        "split": " + ".join(f"{part:.2f}" for part in split),
        "tokens_per_step": f"{counts.tokens_per_target_step:.2f}",
        "tokens_per_step_macro": f"{each.tokens_per_target_step_macro:.2f}",
        "nodes_per_step": f"{each.nodes_per_step:.1f}" if drafts else "-",
        "acceptance": f"{counts.draft_acceptance_rate:.2f}" if drafts else "-",
        "share": f"{counts.drafted_share:.2f}" if drafts else "-",
        "harmonic_mean": f"{counts.harmonic_mean:.2f}" if drafts else "-",
        "length": f"{counts.mean_acceptance_length:.2f}" if drafts else "-",
        "milliseconds": f"{1e3 * counts.decode_seconds_per_token:.2f}",
        "prefill": "-" if each.whole_time else f"{1e3 * counts.prefill_seconds / max(each.texts, 1):.0f}",
        "identical": f"{each.identical}/{each.texts}",
        "repeated": f"{each.repeated:.2f}",
        "stalled": "-" if each.whole_time else f"{each.stalled:.1%}",
    }


def source_table(summaries: Iterable[Summary]) -> Rows:
    """Return who drafted what."""
    rows = []
    for each in summaries:
        for source, drafted in sorted(each.counts.drafted_by_source.items()):
            accepted = each.counts.accepted_by_source.get(source, 0)
            rows.append([each.method, source, str(drafted), str(accepted), f"{accepted / max(drafted, 1):.2f}"])
    return ["method", "source", "drafted", "accepted", "share"], rows


def reliability_table(curve: Iterable[Reliability]) -> Rows:
    """Return how far estimates of acceptance were right."""
    rows = [
        [f"{each.low:g} to {each.high:g}", str(each.nodes), f"{each.estimate:.3f}", f"{each.accepted:.3f}"]
        for each in curve
    ]
    return ["estimate", "nodes", "mean estimate", "accepted"], rows


def _told(ratio: Ratio) -> str:
    return "-" if math.isnan(ratio.value) else str(ratio)
