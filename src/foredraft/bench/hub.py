"""The public tasks' files from the Hugging Face hub, at revisions that are pinned, so that a task stays the same task.

Knows names and revisions. What was fetched once lies in the hub's own cache, and is found there offline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import UsageError


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a dataset: its repository, the commit, and the path."""

    repository: str
    revision: str
    path: str


HUB_FILES: Mapping[str, HubFile] = {
    "humaneval": HubFile(
        "openai/openai_humaneval",
        "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        "openai_humaneval/test-00000-of-00001.parquet",
    ),
    "gsm8k": HubFile("openai/gsm8k", "e53f048856ff4f594e959d75785d2c2d37b678ee", "main/test-00000-of-00001.parquet"),
    "mt_bench": HubFile(
        "HuggingFaceH4/mt_bench_prompts", "e3a795c5e9a82ee40611c416b8a7786c73198991", "raw/question.jsonl"
    ),
}


def fetch_task(task: str) -> Path:
    """Return a task's file, fetched from the hub or found in its cache.

    Raises:
        UsageError: the hub has no file of this task, or cannot be reached.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if task not in HUB_FILES:
        raise UsageError(
            f"The task {task} is not fetched from the hub; give a folder with its file as --data, or choose one of: "
            f"{', '.join(HUB_FILES)}."
        )
    file = HUB_FILES[task]
    try:
        found = hf_hub_download(file.repository, file.path, repo_type="dataset", revision=file.revision)
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError, RuntimeError) as error:
        raise UsageError(
            f"The task {task} is not here and {file.repository} cannot be fetched from the hub "
            f"({type(error).__name__}); give a folder with its file as --data, or use the task embedded."
        ) from error
    return Path(found)
