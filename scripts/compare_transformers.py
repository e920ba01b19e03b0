"""Compare, inside transformers' `generate`: plain, prompt lookup, an assistant, and foredraft's `custom_generate`.

One process, the embedded models, the same prompts, in random order by prompt. Whole calls are timed, the prompt's pass
included.
"""

import argparse
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from foredraft.demo import embedded_path
from transformers import AutoModelForCausalLM, AutoTokenizer

import foredraft
from foredraft.bench.metrics import LOOP_SHARE, repeated_share, speed_up
from foredraft.bench.tasks import DEFAULT_TASKS, TaskPrompt, load_task
from foredraft.integrations.transformers import last_statistics
from foredraft.request import encoded


@dataclass(slots=True)
class Tally:
    """What a method came to on a task: the new ids, seconds and passes of the target of each prompt."""

    ids: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> np.ndarray:
        """Tokens written, float64[P]."""
        return np.array([len(each) for each in self.ids], np.float64)


def methods(assistant: Any, store: str | None) -> dict[str, dict[str, Any]]:
    """Return the arguments that each method adds to a call."""

    def ours(**config: Any) -> dict[str, Any]:
        return {"custom_generate": foredraft.generate, "speculative_config": config}

    return {
        "plain": {},
        "prompt_lookup_num_tokens=10": {"prompt_lookup_num_tokens": 10},
        "assistant_model (the embedded draft model)": {"assistant_model": assistant},
        "foredraft none": ours(method="none"),
        "foredraft prompt_lookup": ours(method="prompt_lookup"),
        "foredraft adaptix": ours(method="adaptix"),
        "foredraft rest": ours(method="rest", **({"store": store} if store else {})),
    }


class Passes:
    """Counts the forward passes of a model."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        model.register_forward_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.count += 1


def batch(prompt: TaskPrompt, tokenizer: Any, vocabulary: int) -> Mapping[str, torch.Tensor]:
    """Return a prompt as a batch of one row."""
    ids = torch.from_numpy(encoded(prompt.prompt, tokenizer, vocabulary))[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def measure(
    model: Any, passes: Passes, calls: Mapping[str, dict[str, Any]], inputs: list[Any], settings: dict[str, Any]
) -> dict[str, Tally]:
    """Write every prompt with every method, in random order."""
    order, tallies = random.Random(0), {name: Tally() for name in calls}  # noqa: S311  # an order, no secret
    for number, batch in enumerate(inputs):
        for name in order.sample(list(calls), len(calls)):
            torch.manual_seed(number)
            before, clock = passes.count, time.perf_counter()
            ids = model.generate(**batch, **settings, **calls[name])
            tallies[name].seconds.append(time.perf_counter() - clock)
            new = ids[0, batch["input_ids"].shape[1] :].tolist()
            tallies[name].ids.append(new)
            own = last_statistics(model)[0].steps if "custom_generate" in calls[name] else passes.count - before
            tallies[name].passes.append(own)
    return tallies


def rows(task: str, tallies: Mapping[str, Tally]) -> list[str]:
    """Return a line of the table for each method."""
    plain, lines = tallies["plain"], []
    straight = np.array([repeated_share(ids) <= LOOP_SHARE for ids in plain.ids])
    for name, tally in tallies.items():
        same = sum(a == b for a, b in zip(tally.ids, plain.ids, strict=True))
        times = [np.array(each) for each in (plain.seconds, plain.tokens, tally.seconds, tally.tokens)]
        without = speed_up(*(each[straight] for each in times)) if straight.any() else "-"
        lines.append(
            f"| {task} | {name} | {same}/{len(tally.ids)} | {tally.tokens.sum() / sum(tally.passes):.2f} | "
            f"{1e3 * sum(tally.seconds) / tally.tokens.sum():.2f} | {speed_up(*times)} | {without} ({straight.sum()}) |"
        )
    return lines


def main() -> None:
    """Load, compare, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the tasks' files")
    parser.add_argument("--prompts", type=int, default=30, help="of each task")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--store", help="for rest; the embedded model's own by default")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    model, assistant = (
        AutoModelForCausalLM.from_pretrained(embedded_path(name), dtype=dtype) for name in ("demo", "demo-draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(embedded_path("demo"))
    sampling: dict[str, Any] = {"do_sample": given.temperature > 0}
    if given.temperature > 0:
        sampling |= {"temperature": given.temperature, "top_k": 0}
    settings = {"max_new_tokens": given.tokens, **sampling}
    calls, passes = methods(assistant, given.store), Passes(model)
    for call in calls.values():  # first calls pay for what is made once
        model.generate(**tokenizer("def main():", return_tensors="pt"), **settings, **call)
    print(
        "| task | method | same ids | tokens / target pass | ms / token | speed-up [95%] | without loops [95%] "
        "(prompts) |"
    )
    print("|---|---|---|---|---|---|---|")
    for task in DEFAULT_TASKS:
        prompts = load_task(task, given.data, given.prompts)
        inputs = [batch(prompt, tokenizer, model.config.vocab_size) for prompt in prompts]
        print("\n".join(rows(task, measure(model, passes, calls, inputs, settings))), flush=True)


if __name__ == "__main__":
    main()
