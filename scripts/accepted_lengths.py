"""Compare how many tokens of an EAGLE-3 drafter's chains are accepted in vLLM and in foredraft.

Runs in the environment of `make test-vllm`:
`.venv-vllm/bin/python scripts/accepted_lengths.py --data PROMPTS --drafter HEAD`. Both write the same texts greedily,
in float32, from the same files, with chains of the same length. The exit status is 1 if the mean accepted lengths,
1 + accepted / drafts, differ by more than 2 %. vLLM also counts tokens that are accepted after the end of a text.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

import foredraft
from foredraft.bench.tasks import TaskPrompt, load_tasks
from foredraft.model.gguf.files import SMOLLM2
from foredraft.model.loading import load_model, load_tokenizer
from vllm_server import complete, counter, serving

PORT = 8790
MOST_APART = 0.02  # of mean accepted lengths, relative
Written = tuple[list[tuple[int, ...]], tuple[float, float]]  # the ids of each answer; drafts and accepted tokens
# every chain is drafted in full, as vLLM does
CHAINS = {"out_degree": 1, "least_probability": 0.0, "least_share": 0.0}


def by_vllm(target: Path, drafter: Path, prompts: list[TaskPrompt], most: int, tokens: int) -> Written:
    """Let vLLM answer the prompts, with chains of `most` tokens."""
    speculation = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": most}
    with serving(str(target), PORT, target / "vllm.log", speculation) as url:
        answers = [complete(url, each.prompt(), tokens).token_ids for each in prompts]
        drafts, accepted = (counter(url, f"spec_decode_num_{what}") for what in ("drafts", "accepted_tokens"))
    return answers, (drafts, accepted)


def by_foredraft(target: Path, drafter: Path, prompts: list[TaskPrompt], most: int, tokens: int) -> Written:
    """Let foredraft answer the prompts, with chains of `most` tokens."""
    speculation = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": most, "levels": most, **CHAINS}
    generator = foredraft.load(str(target), dtype="float32", compile=False, speculative_config=speculation)
    made = [generator.generate(each.prompt(), max_new_tokens=tokens) for each in prompts]
    drafts, accepted = (sum(getattr(each.statistics, name) for each in made) for name in ("drafting_steps", "accepted"))
    return [tuple(each.token_ids) for each in made], (drafts, accepted)


def main() -> None:
    """Write the answers in both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the tasks' files")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--drafter", type=Path, required=True, help="a folder in the format of speculators")
    parser.add_argument("--prompts", type=int, default=10, help="per task")
    parser.add_argument("--tokens", type=int, default=128, help="maximum number of new tokens")
    parser.add_argument("--most", type=int, default=3, help="tokens of a chain")
    given = parser.parse_args()
    prompts = load_tasks((), given.data, given.prompts)
    with tempfile.TemporaryDirectory() as name:
        target = Path(name)
        load_model(given.model, torch.float32, "cpu").save_pretrained(target)
        load_tokenizer(given.model).save_pretrained(target)
        arguments = target, given.drafter, prompts, given.most, given.tokens
        found = {"vLLM": by_vllm(*arguments), "foredraft": by_foredraft(*arguments)}
    print("| | drafts | accepted | mean accepted length |\n|---|---|---|---|")
    for name, (_, (drafts, accepted)) in found.items():
        print(f"| {name} | {drafts:.0f} | {accepted:.0f} | {1 + accepted / drafts:.3f} |")
    theirs, ours = (1 + accepted / drafts for _, (drafts, accepted) in found.values())
    same = sum(a == b for a, b in zip(*(ids for ids, _ in found.values()), strict=True))
    print(f"{same} of {len(prompts)} answers are the same ids; the lengths differ by {abs(ours / theirs - 1):.2%}")
    sys.exit(abs(ours / theirs - 1) > MOST_APART)


if __name__ == "__main__":
    main()
