"""What cells add up to: a row of figures for each setting, task and method, micro and macro, with intervals.

Knows cells and the definitions of the figures. Every figure is worked out from the cells anew, none is stored.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from foredraft.bench.cell import Cell, Writing
from foredraft.bench.drafts import DraftCounts, add_counts
from foredraft.bench.environment import differences
from foredraft.bench.metrics import LOOP_SHARE, NO_RATIO, Ratio, finite, mean, mean_speed_up, speed_up
from foredraft.engine.statistics import Statistics, add_up
from foredraft.errors import UsageError

ALL = "all"
"""The row over all tasks."""

DEPTHS = 8
"""As deep as a table tells the steps that reached it."""

PARTS = ("draft", "forward", "verify", "commit", "other")


@dataclass(frozen=True, slots=True)
class Summary:
    """One method on one task in one setting.

    Attributes:
        settings: as `settings_name` words them.
        task: its name, or `all`.
        method: the label.
        texts: pairs that were written.
        failed: cells whose method raised.
        stalled: share of the method's decode time that the machine held passes up, and that no figure contains.
        identical: texts that are plain decoding's.
        statistics: the counts added up, and their rates: the micro average.
        tokens_per_target_step_macro: mean over texts.
        speed_up: of the sums: decode time a token, plain over own; for the peer, all its time.
        speed_up_macro: geometric mean over texts.
        speed_up_without_loops: of the sums, over the texts whose plain output does not loop.
        texts_without_loops: how many those are.
        repeated: mean share of repeated 8-grams in the output.
        prefill_seconds: mean over texts; NaN for the peer.
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
    prefill_seconds: float
    milliseconds: dict[str, float]
    counts: DraftCounts
    whole_time: bool

    @property
    def wasted(self) -> int:
        """Drafted tokens that were not emitted."""
        return self.statistics.drafted - self.statistics.accepted

    @property
    def nodes_per_step(self) -> float:
        """Drafted tokens a target step."""
        return self.statistics.drafted / max(self.statistics.steps, 1)

    @property
    def merged(self) -> int:
        """Accepted tokens that came through a loan of a draft graph."""
        accepted = self.counts.accepted_by_source.items()
        return sum(count for source, count in accepted if source.endswith(", merged"))

    @property
    def reached(self) -> tuple[float, ...]:
        """Of all target steps, the share that accepted at least 1, 2, ... drafted tokens."""
        return tuple(count / max(self.statistics.steps, 1) for count in self.counts.accepted_by_depth)

    @property
    def cost_ratio(self) -> float:
        """Time of drafting one token over that of a plain step, EESD's alpha; 0 where nothing was drafted."""
        plain = self.speed_up.value * self.statistics.decode_seconds_per_token
        drafted_a_token = self.statistics.drafted / max(self.statistics.emitted, 1)
        return self.milliseconds["draft"] / 1e3 / drafted_a_token / max(plain, 1e-12) if drafted_a_token else 0.0

    @property
    def modelled_speed_up(self) -> float:
        """What EESD's cost model expects (its equations 13 and 14), where a verification costs what a plain step does.

        A text of L tokens takes r_d L / v_d drafted tokens and (1 - r_d) L steps.
        """
        v_d, r_d = self.statistics.draft_acceptance_rate, self.statistics.drafted_share
        return v_d / ((self.cost_ratio - v_d) * r_d + v_d) if v_d else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, for JSON; None where there is nothing to tell, as JSON has no other numbers."""
        figures = asdict(self)
        counts = figures.pop("counts")
        del counts["estimated"]
        more = ("wasted", "nodes_per_step", "merged", "reached", "cost_ratio", "modelled_speed_up")
        figures |= {**counts, "statistics": self.statistics.as_dict(), **{name: getattr(self, name) for name in more}}
        figures["reliability"] = [asdict(each) for each in self.counts.reliability]
        ratios = ("speed_up", "speed_up_macro", "speed_up_without_loops")
        figures |= {name: {key: finite(value) for key, value in figures[name].items()} for name in ratios}
        return {name: finite(value) if isinstance(value, float) else value for name, value in figures.items()}


def summarize_cells(cells: Iterable[Cell]) -> list[Summary]:
    """Return a summary for each setting, method and task, and one over all tasks where there are several.

    Raises:
        UsageError: the cells are of unlike environments.
    """
    cells = list(cells)
    check_alike(cells)
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.place.settings, cell.place.method, cell.place.task), []).append(cell)
    summaries = [_summary(task, group) for (_, _, task), group in groups.items()]
    whole: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        whole.setdefault((cell.place.settings, cell.place.method), []).append(cell)
    tasks = {cell.place.task for cell in cells}
    return [*summaries, *(_summary(ALL, group) for group in whole.values() if len(tasks) > 1)]


def overall(summaries: Sequence[Summary]) -> list[Summary]:
    """Return each method's row over all tasks, or over the only one."""
    return [each for each in summaries if each.task == ALL] or list(summaries)


def check_alike(cells: Sequence[Cell]) -> None:
    """Refuse cells whose figures must not be compared.

    Raises:
        UsageError: naming what is unlike.
    """
    for cell in cells[1:]:
        unlike = differences(cells[0].environment, cell.environment)
        if unlike:
            raise UsageError(
                f"The cells {cells[0].place.path()} and {cell.place.path()} are of unlike environments "
                f"({'; '.join(unlike[:3])}), so they are not compared; report each folder by itself."
            )


def _summary(task: str, group: Sequence[Cell]) -> Summary:
    pairs = [cell.whole for cell in group if cell.whole is not None]
    own = [writing for _, writing in pairs]
    whole_time = any(not writing.parts for writing in own)
    calm = [pair for pair in pairs if pair[0].repeated <= LOOP_SHARE]
    tokens = max(sum(writing.tokens for writing in own), 1)
    return Summary(
        settings=group[0].place.settings,
        task=task,
        method=group[0].place.method,
        texts=len(pairs),
        failed=sum(bool(cell.failure) for cell in group),
        stalled=_stalled(own),
        identical=sum(base.token_ids == writing.token_ids for base, writing in pairs),
        statistics=add_up([_counted(each) for each in own]),
        tokens_per_target_step_macro=mean(writing.tokens / max(writing.steps, 1) for writing in own),
        speed_up=_micro(pairs, whole_time),
        speed_up_macro=_macro(pairs, whole_time),
        speed_up_without_loops=_micro(calm, whole_time),
        texts_without_loops=len(calm),
        repeated=mean(writing.repeated for writing in own),
        prefill_seconds=float("nan") if whole_time else mean(writing.prefill_seconds for writing in own),
        milliseconds={part: 1e3 * sum(each.parts.get(part, 0.0) for each in own) / tokens for part in PARTS},
        counts=add_counts([cell.counts for cell in group if cell.counts is not None]),
        whole_time=whole_time,
    )


def _counted(each: Writing) -> Statistics:
    return Statistics(
        each.tokens, each.steps, each.drafting_steps, each.drafted, each.accepted, each.prefill_seconds,
        each.decode_seconds,
    )  # fmt: skip


def _stalled(writings: Sequence[Writing]) -> float:
    stalled = sum(each.stalled_seconds for each in writings)
    return stalled / max(stalled + sum(each.decode_seconds for each in writings), 1e-9)


def _seconds(writing: Writing, whole_time: bool) -> float:
    return writing.total_seconds if whole_time else writing.decode_seconds


def _micro(pairs: Sequence[tuple[Writing, Writing]], whole_time: bool) -> Ratio:
    if not pairs:
        return NO_RATIO
    columns = [[(_seconds(each, whole_time), each.tokens) for each in side] for side in zip(*pairs, strict=True)]
    (base_seconds, base_tokens), (seconds, tokens) = (np.array(column, np.float64).T for column in columns)
    return speed_up(base_seconds, base_tokens, seconds, tokens)


def _macro(pairs: Sequence[tuple[Writing, Writing]], whole_time: bool) -> Ratio:
    a_token = [[_seconds(each, whole_time) / max(each.tokens, 1) for each in pair] for pair in pairs]
    return mean_speed_up(np.array([base / own for base, own in a_token], np.float64))


def shown(each: Summary) -> dict[str, str]:
    """Return a row's figures as texts, for every table; `-` where there is nothing to tell."""
    counts, drafts = each.statistics, each.statistics.drafted > 0
    return {
        "method": each.method,
        "task": each.task,
        "texts": f"{each.texts} ({each.failed} failed)" if each.failed else str(each.texts),
        "speed_up": _told(each.speed_up),
        "honest": f"{_told(each.speed_up_without_loops)} ({each.texts_without_loops})",
        "modelled": f"{each.modelled_speed_up:.2f}",
        "merged": str(each.merged),
        "reached": " ".join(f"{share:.2f}" for share in each.reached[:DEPTHS]) or "-",
        "split": " + ".join(f"{part:.2f}" for part in _split(each)),
        "mean": _told(each.speed_up_macro),
        "tokens_a_step": f"{counts.tokens_per_target_step:.2f}",
        "tokens_a_step_macro": f"{each.tokens_per_target_step_macro:.2f}",
        "nodes_a_step": f"{each.nodes_per_step:.1f}" if drafts else "-",
        "acceptance": f"{counts.draft_acceptance_rate:.2f}" if drafts else "-",
        "share": f"{counts.drafted_share:.2f}" if drafts else "-",
        "harmonic": f"{counts.harmonic_mean:.2f}" if drafts else "-",
        "length": f"{counts.mean_acceptance_length:.2f}" if drafts else "-",
        "wasted": str(each.wasted) if drafts else "-",
        "milliseconds": f"{1e3 * counts.decode_seconds_per_token:.2f}",
        "prefill": "-" if math.isnan(each.prefill_seconds) else f"{1e3 * each.prefill_seconds:.0f}",
        "identical": f"{each.identical}/{each.texts}",
        "repeated": f"{each.repeated:.2f}",
        "stalled": "-" if math.isnan(each.prefill_seconds) else f"{each.stalled:.1%}",
    }


def _told(ratio: Ratio) -> str:
    return "-" if math.isnan(ratio.value) else str(ratio)


def _split(each: Summary) -> tuple[float, float, float]:
    """Return the milliseconds of drafting, forwards and all else of an emitted token."""
    draft, forward = each.milliseconds["draft"], each.milliseconds["forward"]
    return draft, forward, sum(each.milliseconds.values()) - draft - forward
