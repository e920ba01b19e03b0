"""Replay recorded answers of the default model through vLLM's proposer, without vLLM: tokens per step by option.

Reads the answers written by `compare_vllm.py --json`. Every answer is a request; all requests of a task are one batch.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.bench.tasks import load_task
from foredraft.integrations.request_drafter import RequestDrafter
from foredraft.integrations.vllm import parse_proposer_options, served_drafter
from foredraft.model.gguf.files import SMOLLM2
from foredraft.model.loading import load_config, load_tokenizer, located
from foredraft.request import encoded

Texts = list[tuple[list[int], list[int]]]
"""Ids of each prompt and its answer."""


def replay(options: Mapping[str, Any], most: int, texts: Texts, vocabulary: int) -> tuple[float, float, float]:
    """Return tokens per target step, drafted tokens per step, and the acceptance rate with these options."""
    method, own = parse_proposer_options(options)
    model = located(SMOLLM2)
    drafter = served_drafter(method, own, model, vocabulary)
    ends = np.array([len(prompt) + len(answer) for prompt, answer in texts])
    requests = RequestDrafter(
        drafter,
        vocabulary=vocabulary,
        most=most,
        rows=len(texts),
        longest=int(ends.max()) + most + 2,
    )
    token_ids = np.zeros((len(texts), int(ends.max()) + most + 2), np.int32)
    for row, (prompt, answer) in enumerate(texts):
        token_ids[row, : ends[row]] = prompt + answer
    # the pass over the prompt emits the first token
    lengths, steps, drafted, accepted = np.array([len(prompt) + 1 for prompt, _ in texts]), 0, 0, 0
    while (lengths < ends).any():
        sampled = [[1] if length < end else [] for length, end in zip(lengths, ends, strict=True)]
        for row, draft in enumerate(requests.propose(sampled, lengths, token_ids)):
            if lengths[row] < ends[row]:
                wanted = token_ids[row, lengths[row] : ends[row]][: len(draft)]
                same = int(np.cumprod(wanted == draft[: len(wanted)]).sum())
                steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + same
                lengths[row] = min(lengths[row] + same + 1, ends[row])
    written = sum(len(answer) - 1 for _, answer in texts)
    return written / steps, drafted / steps, accepted / max(drafted, 1)


def main() -> None:
    """Print a table row for each set of options and task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path, help="file written by compare_vllm.py --json")
    parser.add_argument("--data", type=Path, required=True, help="folder with the tasks' files")
    parser.add_argument("--most", type=int, default=8, help="num_speculative_tokens")
    parser.add_argument("--options", action="append", required=True, help="foredraft's options in JSON; repeatable")
    given = parser.parse_args()
    tokenizer, vocabulary = load_tokenizer(SMOLLM2), load_config(SMOLLM2).vocab_size
    texts: dict[str, Texts] = {}
    for part in json.loads(given.answers.read_text(encoding="utf-8")):
        if part["method"] == "none":
            answers = [answer["token_ids"] for answer in part["answers"]]
            prompts = load_task(part["task"], given.data, len(answers))
            texts[part["task"]] = [
                (encoded(prompt.prompt(), tokenizer, vocabulary).tolist(), answer)
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
    print("| options | task | tokens / target step | drafted / step | accepted / drafted |")
    print("|---|---|---|---|---|")
    for options in given.options:
        figures = {task: replay(json.loads(options), given.most, each, vocabulary) for task, each in texts.items()}
        figures["mean"] = tuple(np.mean(list(figures.values()), axis=0))  # type: ignore[assignment]  # three numbers, as in the rows
        for task, (per_step, drafted, accepted) in figures.items():
            print(f"| `{options}` | {task} | {per_step:.2f} | {drafted:.1f} | {accepted:.2f} |", flush=True)


if __name__ == "__main__":
    main()
