"""Prompts of the public tasks, read from files the user has.

Knows the files' fields; does not know models. Nothing is downloaded.
"""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import UsageError
from foredraft.options import nearest


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """One prompt.

    Attributes:
        task: the task's name.
        number: its place in the file, from 0.
        prompt: a text to continue, or a conversation.
    """

    task: str
    number: int
    prompt: str | tuple[Mapping[str, str], ...]


_TASKS: Mapping[str, tuple[str, str, bool]] = {  # file, field, whether it is a question rather than a text to continue
    "humaneval": ("humaneval.jsonl", "prompt", False),
    "gsm8k": ("gsm8k_test.jsonl", "question", True),
    "mt_bench": ("mt_bench.jsonl", "turns", True),
    "spec_bench": ("spec_bench.jsonl", "turns", True),
}


DEFAULT_TASKS = ("humaneval", "gsm8k", "mt_bench")


def task_names() -> list[str]:
    """Return the known tasks."""
    return list(_TASKS)


def load_task(task: str, folder: Path, limit: int) -> list[TaskPrompt]:
    """Return `limit` prompts of a task, spread evenly over its file; first turns where there are several.

    Raises:
        UsageError: an unknown task, a missing or broken file, or one without usable prompts.
    """
    if task not in _TASKS:
        raise UsageError(f"There is no task {task!r}.{nearest(task, _TASKS)} Tasks are: {', '.join(_TASKS)}.")
    name, field, is_question = _TASKS[task]
    path = next((folder / each for each in (name, name + ".gz") if (folder / each).exists()), None)
    if path is None:
        raise UsageError(f"The task {task} needs the file {name} in {folder}; give its folder with --data.")
    rows = _rows(path)
    texts = [(number, _text(row.get(field))) for number, row in enumerate(rows)]
    usable = [(number, text) for number, text in texts if text]
    if not usable:
        raise UsageError(f"{path} has no row with a text in its field {field!r}.")
    count = min(limit, len(usable))
    chosen = [usable[i * len(usable) // count] for i in range(count)]
    return [TaskPrompt(task, number, _prompt(text, is_question)) for number, text in chosen]


def _prompt(text: str, is_question: bool) -> str | tuple[Mapping[str, str], ...]:
    return ({"role": "user", "content": text},) if is_question else text


def _text(value: Any) -> str:
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else ""


def _rows(path: Path) -> list[Mapping[str, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"The file {path} cannot be read as JSON lines ({error}).") from error
    return [row for row in rows if isinstance(row, Mapping)]
