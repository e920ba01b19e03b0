"""Benchmark prompts: the embedded set, public tasks from local files, and the user's JSON lines or Parquet.

Does not depend on models. The embedded prompts were written for this project, and nothing is tuned to them.
"""

import gzip
import json
import random
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftWarning, UsageError
from foredraft.options import check_known, nearest, user_path

EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """One prompt."""

    task: str  # the task's name, followed by a slash and the category if it has several
    number: int  # index in the file, from 0
    turns: tuple[str, ...]  # user messages; each follows the model's answers to the earlier ones
    is_question: bool = True  # whether it is a conversation; False for a text to continue

    def prompt(self, answers: Sequence[str] = ()) -> str | tuple[Mapping[str, str], ...]:
        """Return the text, or the conversation up to the question after `answers`, for `Generator.generate`."""
        if not self.is_question:
            return self.turns[0]
        messages = []
        for question, answer in zip(self.turns, answers, strict=False):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return (*messages, {"role": "user", "content": self.turns[len(answers)]})

    def input(self, tokenizer: Any, answers: Sequence[str] = ()) -> str | tuple[Mapping[str, str], ...]:
        """Return `prompt(answers)`; without a chat template, its messages joined to one text."""
        prompt = self.prompt(answers)
        if isinstance(prompt, str) or getattr(tokenizer, "chat_template", None):
            return prompt
        return "\n\n".join([*(message["content"] for message in prompt), ""])


@dataclass(frozen=True, slots=True)
class _Source:
    """The location and format of a task's rows."""

    file: str  # its name in the user's folder
    field: str  # the field of the text
    is_question: bool = True  # as in `TaskPrompt`
    category: str = ""  # the field of the category, if any


_TASKS: Mapping[str, _Source] = {
    EMBEDDED: _Source("embedded.jsonl", "turns", category="category"),
    "humaneval": _Source("humaneval.jsonl", "prompt", is_question=False),
    "gsm8k": _Source("gsm8k_test.jsonl", "question"),
    "mt_bench": _Source("mt_bench.jsonl", "turns"),
    "spec_bench": _Source("spec_bench.jsonl", "turns", category="category"),
}

_USUAL_FIELDS = ("prompt", "question", "turns", "text")  # of a file given without a field: the first that it has
DEFAULT_TASKS = ("humaneval", "gsm8k", "mt_bench")  # if a folder of files is given; else the embedded set
_MT_BENCH = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
"""Categories in Spec-Bench's file that together are its category MT-Bench."""


def load_tasks(tasks: Sequence[str] | None, folder: Path | None, limit: int) -> list[TaskPrompt]:
    """Return the prompts of several tasks, or of the default ones; raises the errors of `load_task`.

    UsageError for two files of one name, by which results are told apart.
    """
    prompts, names = list[TaskPrompt](), dict[str, str]()
    for task in dict.fromkeys(tasks or ((EMBEDDED,) if folder is None else DEFAULT_TASKS)):
        found = load_task(task, folder, limit)
        same = names.setdefault(found[0].task, task)
        if same != task and task.partition("/")[0] not in _TASKS:
            raise UsageError(
                f"The tasks {same} and {task} are both called {found[0].task}, and results are told apart by that "
                "name; rename a file, or measure the tasks in runs of their own."
            )
        prompts += found
    return prompts


def interleaved(prompts: Sequence[TaskPrompt]) -> list[TaskPrompt]:
    """Shuffle each task's prompts and interleave the tasks, so that any prefix is balanced."""
    groups: dict[str, list[TaskPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.task, []).append(prompt)
    for group in groups.values():
        random.Random(0).shuffle(group)  # noqa: S311  # an order, not a secret
    return [prompt for row in zip_longest(*groups.values()) for prompt in row if prompt is not None]


def load_task(task: str, folder: Path | None, limit: int) -> list[TaskPrompt]:
    """Return `limit` (at least 1) prompts of a task, or of each of its categories, spread evenly over its file.

    `task` is a known one; `TASK/CATEGORY` for one category; or `FILE` or `FILE:FIELD`, a file of JSON lines or Parquet
    and the field with the text or the list of turns of a question. `folder` has the tasks' files; the package has
    the embedded set's. UsageError for an unknown task, category or field, and a file that is missing,
    damaged, or without usable prompts.
    """
    if limit < 1:
        raise UsageError(f"The number of prompts is {limit}; it must be at least 1.")
    name, _, category = task.partition("/")
    if name in _TASKS:
        source = _TASKS[name]
        path = _located(name, source, folder)
    else:
        path, field = _own_file(task)
        name, category, source = path.name, "", _Source(str(path), field)
    groups: dict[str, list[TaskPrompt]] = {}
    for prompt in _prompts(name, path, source):
        groups.setdefault(prompt.task, []).append(prompt)
    if category:
        known = [group.partition("/")[2] for group in groups if "/" in group]
        check_known(category, known, f"The task {name} has no category", "Its categories are")
        groups = {task: groups[task]}
    return [prompt for group in groups.values() for prompt in spread(group, limit)]


def spread(prompts: list[TaskPrompt], limit: int) -> list[TaskPrompt]:
    """Return at most `limit` prompts, evenly spread."""
    count = min(limit, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _own_file(task: str) -> tuple[Path, str]:
    """Parse `FILE` or `FILE:FIELD`."""
    path = user_path(task)
    if path.is_file():
        names = {name for row in _rows(path) for name in row}
        return path, next((each for each in _USUAL_FIELDS if each in names), _USUAL_FIELDS[0])
    location, _, field = task.rpartition(":")
    if not (location and field):
        raise UsageError(
            f"There is no task {task!r}.{nearest(task, _TASKS)} Tasks are: {', '.join(_TASKS)}, or FILE or "
            "FILE:FIELD for an existing file of JSON lines or Parquet."
        )
    path = user_path(location)
    if not path.is_file():
        raise UsageError(f"There is no file {location} to read prompts from.")
    return path, field


def _located(task: str, source: _Source, folder: Path | None) -> Path:
    """Return a known task's file: the package's or the user's."""
    if task == EMBEDDED:
        return Path(__file__).parent / "data" / source.file  # 60 prompts, ten of each kind
    for path in () if folder is None else (folder / source.file, folder / f"{source.file}.gz"):
        if path.exists():
            return path
    where = "" if folder is None else f" in {folder}"
    raise UsageError(f"The task {task} needs the file {source.file}{where}; give its folder with --data.")


def _prompts(task: str, path: Path, source: _Source) -> list[TaskPrompt]:
    """Read all usable prompts of a file; UsageError if there is none, and a ForedraftWarning counts other rows."""
    prompts, rows = [], _rows(path)
    for number, row in enumerate(rows):
        text = row.get(source.field, row.get("prompt") if source.field == "turns" else None)
        turns = text if isinstance(text, list) else [text]
        if turns and all(isinstance(each, str) and each.strip() for each in turns):
            name, category = task, row.get(source.category)
            if isinstance(category, str):
                name += "/mt_bench" if category in _MT_BENCH else f"/{category}"
            prompts.append(TaskPrompt(name, number, tuple(turns), source.is_question))
    if not prompts:
        fields = sorted({name for row in rows[:20] for name in row})
        raise UsageError(
            f"{path} has no row with a text in its field {source.field!r}.{nearest(source.field, fields)} Its fields "
            f"are: {', '.join(fields) or 'none'}."
        )
    if left := len(rows) - len(prompts):
        warnings.warn(
            f"{left} of the {len(rows)} rows of {path} have no text in the field {source.field!r} and are left out.",
            ForedraftWarning,
            stacklevel=2,
        )
    return prompts


def _rows(path: Path) -> list[Mapping[str, Any]]:
    """Read the rows of a file of JSON lines, plain or gzip, or of a Parquet file; what is no object has no fields."""
    if path.suffix != ".parquet":
        return [row if isinstance(row, Mapping) else {} for _, row in read_json_lines(path)]
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_table(path).to_pylist())
    except (OSError, ValueError) as error:
        raise UsageError(f"The file {path} cannot be read as Parquet ({error}).") from error


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and the value of every non-empty line; UsageError for a line that is not JSON."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, json.loads(line)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"The file {path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"The file {path} is not text in UTF-8 ({error}); convert it first.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"Line {number} of {path} is not JSON ({error}); give one value a line.") from error
