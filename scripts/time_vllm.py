"""Time plain decoding inside vLLM as vLLM comes, compiled: milliseconds a token, one request at a time.

Runs in the environment that `make test-vllm` makes: `.venv-vllm/bin/python scripts/time_vllm.py --data PROMPTS`. Beside
it, in the same minutes: `foredraft bench run --data PROMPTS --prompts 10 --method none`.
"""

import argparse
import time
from pathlib import Path
from statistics import median

from foredraft.demo import embedded_path
from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # in that environment alone

from foredraft.bench.tasks import DEFAULT_TASKS, load_task
from foredraft.model.loading import load_tokenizer


def milliseconds_a_token(llm: LLM, ids: list[int], sampling: SamplingParams) -> float:
    """Write a text, its prompt included in the time."""
    start = time.perf_counter()
    (answer,) = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
    return 1e3 * (time.perf_counter() - start) / len(answer.outputs[0].token_ids)


def main() -> None:
    """Print a line for each temperature."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the tasks' files")
    parser.add_argument("--prompts", type=int, default=10, help="of each of the three tasks")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens at most")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer("demo")
    texts = [text for task in DEFAULT_TASKS for text in load_task(task, arguments.data, arguments.prompts)]
    # as the bench encodes them: the embedded model has no chat template, so questions end in an empty line
    said = [text.turns[0] + "\n\n" if text.is_question else text.turns[0] for text in texts]
    prompts = [list(tokenizer(each).input_ids) for each in said]
    llm = LLM(
        model=str(embedded_path("demo")), dtype=arguments.dtype, max_num_seqs=1, disable_log_stats=True,
        enable_prefix_caching=False,
    )  # fmt: skip
    for temperature in (0.0, 0.7):
        sampling = SamplingParams(temperature=temperature, max_tokens=arguments.tokens, seed=0)
        milliseconds_a_token(llm, prompts[0], sampling)  # pays for what is made once
        taken = [milliseconds_a_token(llm, ids, sampling) for ids in prompts]
        print(
            f"T={temperature}: median {median(taken):.2f} ms a token, quickest text {min(taken):.2f}, "
            f"{len(prompts)} prompts, {arguments.dtype}"
        )


if __name__ == "__main__":
    main()
