"""Figures of cells, for each setting, task and method, with confidence intervals; and as tables.

Figures are computed from the cells and not stored. Does not depend on how cells are measured.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from foredraft.bench.cell import Cell
from foredraft.engine.statistics import Statistics, add_up
from foredraft.graph.tree import F64, I64

ALL = "all"  # task name of the row over all tasks
Rows = tuple[list[str], list[list[str]]]  # headings and rows of a table

LOOP_SHARE = 0.2  # outputs with a larger share of repeated 8-grams loop, which favours n-gram drafters (chosen)
LEAST_PAIRS = 4  # minimum number of prompts for a confidence interval (chosen)
_T_QUANTILE = (1.959964, 2.372271, 2.822499, 2.555850, 1.589534)
"""Student's t at 97.5 %, within 1 % from 3 degrees of freedom on: the coefficients of the powers of their inverse. The
first is the normal distribution's x, the others are g1(x) to g4(x) of Abramowitz and Stegun, "Handbook of Mathematical
Functions" (1964), 26.7.5."""


def repeated_share(ids: Sequence[int]) -> float:
    """Return the share of 8-grams that occurred before in `ids`; 0 for texts of fewer than two."""
    grams = [tuple(ids[i : i + 8]) for i in range(len(ids) - 7)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio with its 95% interval over prompts: NaN without any; 0 to infinity for fewer than `LEAST_PAIRS`."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = f" [{self.low:.2f}, {self.high:.2f}]" if math.isfinite(self.high) else ""
        return "-" if math.isnan(self.value) else f"{self.value:.2f}{interval}"


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN without values."""
    found = list(values)
    return float(np.mean(found)) if found else math.nan


def finite(value: Any) -> Any:
    """Return a value for JSON, with None for NaN and infinity, which JSON lacks; also inside of mappings and lists."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def speed_up(base_seconds: F64, base_tokens: F64, seconds: F64, tokens: F64, *, prompts: I64 | None = None) -> Ratio:
    """Return the baseline's seconds per token over the method's, of the sums; each array is float64[P], by text.

    `prompts`, int64[P], are the numbers of the texts' prompts, as the turns of a conversation have one; None if each
    text has its own.
    """

    def figure(sums: F64) -> F64:
        logs = np.log(sums)
        return np.asarray(logs[..., 0] - logs[..., 1] - logs[..., 2] + logs[..., 3])

    return _with_interval(figure, np.stack([base_seconds, base_tokens, seconds, tokens], 1), prompts)


def mean_speed_up(ratios: F64, prompts: I64 | None = None) -> Ratio:
    """Return the geometric mean of the texts' speed-ups, float64[P]; texts have equal weight. `prompts` as before."""
    logs = np.stack([np.log(ratios), np.ones(len(ratios))], 1)
    return _with_interval(lambda sums: np.asarray(sums[..., 0] / sums[..., 1]), logs, prompts)


def _with_interval(figure: Callable[[F64], F64], texts: F64, prompts: I64 | None) -> Ratio:
    """Return exp(`figure`) of the sums over `texts`, float64[P, C], with its jackknife interval over prompts.

    Student's t quantile makes it hold for few prompts too, where a bootstrap's is too narrow (Efron and Tibshirani,
    "An Introduction to the Bootstrap", 1993, chapter 11).
    """
    if not len(texts):
        return Ratio(math.nan, math.nan, math.nan)
    numbers = np.arange(len(texts)) if prompts is None else np.unique(prompts, return_inverse=True)[1]
    by_prompt = np.stack([np.bincount(numbers, column) for column in texts.T], 1)
    total, count = by_prompt.sum(0), len(by_prompt)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # some sums may be 0
        value, without = figure(total), figure(total - by_prompt)
        quantile = np.polynomial.Polynomial(_T_QUANTILE)(1 / max(count - 1, 1))
        half = quantile * np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
        ratio, low, high = (float(np.exp(each)) for each in (value, value - half, value + half))
    return Ratio(ratio, low, high) if count >= LEAST_PAIRS and np.isfinite(half) else Ratio(ratio, 0.0, math.inf)


# --- of cells


@dataclass(frozen=True, slots=True)
class Summary:
    """One method on one task in one setting, over the texts that both plain decoding and the method completed."""

    settings: str  # from `settings_name`
    task: str  # its name, or `all`
    method: str  # the label
    texts: int
    failed: int  # cells whose method raised
    stalled: float  # stalled time / (decode + stalled time); the other figures exclude stalled time
    identical: int  # texts equal to plain decoding's
    statistics: Statistics  # sums over texts, and their rates: the micro average
    tokens_per_target_step_macro: float  # mean over texts
    speed_up: Ratio  # of the sums: decode time per token, plain / method; total time for the peer
    speed_up_macro: Ratio  # geometric mean over texts
    speed_up_without_loops: Ratio  # of the sums, over the texts whose plain output does not loop
    texts_without_loops: int
    repeated: float  # mean share of repeated 8-grams in the output
    whole_time: bool  # whether times include prefill, as for the peer, which reports only total time

    @property
    def nodes_per_step(self) -> float:
        return self.statistics.drafted / max(self.statistics.steps, 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, for JSON; None for undefined ones."""
        rates = {"statistics": self.statistics.as_dict(), "nodes_per_step": self.nodes_per_step}
        return dict(finite(asdict(self) | rates))


def summarize_cells(cells: Sequence[Cell]) -> list[Summary]:
    """Return a summary for each setting, method and task, and one over all tasks if there are several."""
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for task in (None, ALL) if len({cell.task for cell in cells}) > 1 else (None,):
        for cell in cells:
            groups.setdefault((cell.settings, task or cell.task, cell.method), []).append(cell)
    return [_summary(*key, group) for key, group in groups.items()]


def overall(summaries: Sequence[Summary]) -> list[Summary]:
    """Return each method's row over all tasks, or over the only one."""
    return [each for each in summaries if each.task == ALL] or list(summaries)


def _summary(settings: str, task: str, method: str, group: Sequence[Cell]) -> Summary:
    numbers: dict[tuple[str, int], int] = {}  # of prompts
    pairs, prompts = [], []
    for cell in group:
        if cell.base is not None and cell.own is not None:
            pairs.append((cell.base, cell.own))
            prompts.append(numbers.setdefault((cell.task, cell.number), len(numbers)))
    prompt_of, own = np.array(prompts, np.int64), [writing for _, writing in pairs]
    whole_time = any(writing.stalled_seconds is None for writing in own)
    times = [
        [(each.total_seconds if whole_time else each.statistics.decode_seconds, len(each.token_ids)) for each in pair]
        for pair in pairs
    ]
    figures = np.array(times, np.float64).reshape(-1, 2, 2)  # by text, plain or own, seconds or tokens
    per_token = figures[:, :, 0] / np.maximum(figures[:, :, 1], 1)
    no_loops = np.array([repeated_share(base.token_ids) <= LOOP_SHARE for base, _ in pairs], np.bool_)
    stalled = sum(writing.stalled_seconds or 0.0 for writing in own)
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
        speed_up=speed_up(*figures.reshape(-1, 4).T, prompts=prompt_of),
        speed_up_macro=mean_speed_up(per_token[:, 0] / per_token[:, 1], prompt_of),
        speed_up_without_loops=speed_up(*figures[no_loops].reshape(-1, 4).T, prompts=prompt_of[no_loops]),
        texts_without_loops=int(no_loops.sum()),
        repeated=mean(repeated_share(writing.token_ids) for writing in own),
        whole_time=whole_time,
    )


# --- tables


def table(summaries: Iterable[Summary], names: Sequence[str]) -> Rows:
    """Return a row for each summary; `names` are of figures in `shown`."""
    rows = [shown(each) for each in summaries]
    return list(names), [[row[name] for name in names] for row in rows]


def shown(each: Summary) -> dict[str, str]:
    """Return a summary's figures as strings, by heading; `-` for undefined ones."""
    counts, drafts = each.statistics, each.statistics.drafted > 0
    return {
        "method": each.method,
        "task": each.task,
        "speed-up [95%]": str(each.speed_up),
        "without loops [95%]": f"{each.speed_up_without_loops} ({each.texts_without_loops})",
        "tokens / step": f"{counts.tokens_per_target_step:.2f}",
        "nodes / step": f"{each.nodes_per_step:.1f}" if drafts else "-",
        "accepted / drafted": f"{counts.draft_acceptance_rate:.2f}" if drafts else "-",
        "ms / token": f"{1e3 * counts.decode_seconds_per_token:.2f}",
        "identical": f"{each.identical}/{each.texts}",
        "repeated 8-grams": f"{each.repeated:.2f}",
        "stalled": "-" if each.whole_time else f"{each.stalled:.1%}",
    }
