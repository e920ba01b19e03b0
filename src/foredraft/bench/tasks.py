"""Prompts: the embedded set, the public tasks from files the user has or the hub, and any local file of JSON lines.

Does not know models. The embedded prompts were written for this project and nothing is tuned to them.
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import UsageError
from foredraft.options import nearest

EMBEDDED = "embedded"
EMBEDDED_FILE = Path(__file__).parent / "data" / "embedded.jsonl"
"""60 prompts, ten of each kind: code, arithmetic, chat, summary, question (answering over a passage), rewriting."""


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """One prompt.

    Attributes:
        task: the task's name, and after a slash the category where it has several.
        number: its place in the file, from 0.
        turns: what the user says; each turn is asked after the model's own answers to those before.
        is_question: whether it is said in a conversation; False for a text to continue.
    """

    task: str
    number: int
    turns: tuple[str, ...]
    is_question: bool = True

    @property
    def prompt(self) -> str | tuple[Mapping[str, str], ...]:
        """The first turn, as `Generator.generate` takes it."""
        return self.asked(())

    def asked(self, answers: tuple[str, ...]) -> str | tuple[Mapping[str, str], ...]:
        """Return the turn after `answers`, with what was said before it, as `Generator.generate` takes it."""
        if not self.is_question:
            return self.turns[0]
        said = []
        for question, answer in zip(self.turns, answers, strict=False):
            said += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return (*said, {"role": "user", "content": self.turns[len(answers)]})


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a task's rows lie.

    Attributes:
        file: its name in the user's folder.
        field: of the text.
        is_question: whether it is said in a conversation.
        category: the field of the category; "" for none.
        hub: repository, pinned commit and path of the same rows on the Hugging Face hub; None where they are not there.
    """

    file: str
    field: str
    is_question: bool = True
    category: str = ""
    hub: tuple[str, str, str] | None = None


_TASKS: Mapping[str, _Source] = {
    EMBEDDED: _Source("embedded.jsonl", "turns", category="category"),
    "humaneval": _Source("humaneval.jsonl", "prompt", is_question=False, hub=(
        "openai/openai_humaneval", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        "openai_humaneval/test-00000-of-00001.parquet",
    )),
    "gsm8k": _Source("gsm8k_test.jsonl", "question", hub=(
        "openai/gsm8k", "e53f048856ff4f594e959d75785d2c2d37b678ee", "main/test-00000-of-00001.parquet",
    )),
    "mt_bench": _Source("mt_bench.jsonl", "turns", hub=(
        "HuggingFaceH4/mt_bench_prompts", "e3a795c5e9a82ee40611c416b8a7786c73198991", "raw/question.jsonl",
    )),
    "spec_bench": _Source("spec_bench.jsonl", "turns", category="category"),
}  # fmt: skip

_USUAL_FIELDS = ("prompt", "question", "turns", "text")
"""Where a file of prompts is given without a field, the first of these that it has."""

DEFAULT_TASKS = ("humaneval", "gsm8k", "mt_bench")
"""Tasks of a run that names none but gives a folder of files; without one, the embedded set."""

_MT_BENCH = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
"""Spec-Bench names these by their MT-Bench category; together they are one of its six."""


def default_tasks(folder: Path | None) -> tuple[str, ...]:
    """Return the tasks of a run that names none."""
    return (EMBEDDED,) if folder is None else DEFAULT_TASKS


def load_tasks(tasks: Sequence[str] | None, folder: Path | None, limit: int) -> list[TaskPrompt]:
    """Return the prompts of several tasks, or of the default ones; takes and raises what `load_task` does."""
    return [prompt for task in tasks or default_tasks(folder) for prompt in load_task(task, folder, limit)]


def load_task(task: str, folder: Path | None, limit: int) -> list[TaskPrompt]:
    """Return `limit` prompts of a task, or of each of its categories, spread evenly over its file.

    Args:
        task: a known task; `TASK/CATEGORY` for one of its categories; or `FILE:FIELD`, a file of JSON lines or Parquet
            and the field that holds the text, or the list of turns, of a question; a usual one where none is given.
        folder: of the tasks' files; None takes the embedded set from the package and the others from the hub.
        limit: at least 1.

    Raises:
        UsageError: an unknown task, category or field, a missing or broken file, or one without usable prompts.
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
    if category and task not in groups:
        known = [group.partition("/")[2] for group in groups if "/" in group]
        raise UsageError(
            f"The task {name} has no category {category!r}.{nearest(category, known)} Its categories are: "
            f"{', '.join(known) or 'none'}."
        )
    wanted = [groups[task]] if category else groups.values()
    return [prompt for group in wanted for prompt in spread(group, limit)]


def spread(prompts: list[TaskPrompt], limit: int) -> list[TaskPrompt]:
    """Return at most `limit` prompts, evenly spread over those given."""
    count = min(limit, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _own_file(task: str) -> tuple[Path, str]:
    """Return the file and the field that a task's name tells.

    Raises:
        UsageError: there is no such file.
    """
    if Path(task).is_file():
        names = {name for row in _rows(Path(task)) for name in row}
        return Path(task), next((each for each in _USUAL_FIELDS if each in names), _USUAL_FIELDS[0])
    location, _, field = task.rpartition(":")
    if not (location and field):
        raise UsageError(
            f"There is no task {task!r}.{nearest(task, _TASKS)} Tasks are: {', '.join(_TASKS)}, or FILE or "
            "FILE:FIELD for a file of JSON lines or Parquet that is there."
        )
    if not Path(location).is_file():
        raise UsageError(f"There is no file {location} to read prompts from.")
    return Path(location), field


def _located(task: str, source: _Source, folder: Path | None) -> Path:
    """Return a known task's file: the package's, the user's, or the hub's, from its cache when offline.

    Raises:
        UsageError: it is not there, or the hub cannot be reached.
    """
    if task == EMBEDDED:
        return EMBEDDED_FILE
    if folder is not None:
        found = next((folder / each for each in (source.file, source.file + ".gz") if (folder / each).exists()), None)
        if found is None:
            raise UsageError(f"The task {task} needs the file {source.file} in {folder}; give its folder with --data.")
        return found
    if source.hub is None:
        fetched = ", ".join(name for name, each in _TASKS.items() if each.hub is not None)
        raise UsageError(
            f"The task {task} is not fetched from the hub; give a folder with its file as --data, or choose one of: "
            f"{fetched}."
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, revision, path = source.hub
    try:
        return Path(hf_hub_download(repository, path, repo_type="dataset", revision=revision))
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError, RuntimeError) as error:
        raise UsageError(
            f"The task {task} is not here and {repository} cannot be fetched from the hub ({type(error).__name__}); "
            "give a folder with its file as --data, or use the task embedded."
        ) from error


def _prompts(task: str, path: Path, source: _Source) -> list[TaskPrompt]:
    """Read every usable prompt of a file.

    Raises:
        UsageError: there is none.
    """
    prompts = []
    rows = _rows(path)
    for number, row in enumerate(rows):
        turns = _turns(row.get(source.field, row.get("prompt") if source.field == "turns" else None))
        if turns:
            prompts.append(TaskPrompt(_named(task, row, source), number, turns, source.is_question))
    if not prompts:
        fields = sorted({name for row in rows[:20] for name in row})
        raise UsageError(
            f"{path} has no row with a text in its field {source.field!r}.{nearest(source.field, fields)} Its fields "
            f"are: {', '.join(fields) or 'none'}."
        )
    return prompts


def _named(task: str, row: Mapping[str, Any], source: _Source) -> str:
    category = row.get(source.category) if source.category else None
    if not isinstance(category, str):
        return task
    return f"{task}/{'mt_bench' if category in _MT_BENCH else category}"


def _turns(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(values) if all(isinstance(each, str) and each.strip() for each in values) else ()


def _rows(path: Path) -> list[Mapping[str, Any]]:
    """Read the objects of a file of JSON lines, plain or gzip, or of a Parquet file.

    Raises:
        UsageError: it cannot be read.
    """
    if path.suffix != ".parquet":
        return [row for _, row in read_json_lines(path) if isinstance(row, Mapping)]
    import pyarrow.parquet

    try:
        return list(pyarrow.parquet.read_table(path).to_pylist())
    except (OSError, ValueError) as error:
        raise UsageError(f"The file {path} cannot be read as Parquet ({error}).") from error


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and the value of every line that is not empty.

    Raises:
        UsageError: the file cannot be read, or a line is not JSON.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, json.loads(line)
    except (OSError, EOFError) as error:
        raise UsageError(f"The file {path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"The file {path} is not text in UTF-8 ({error}); convert it first.") from error
    except ValueError as error:
        raise UsageError(f"Line {number} of {path} is not JSON ({error}); give one value a line.") from error
