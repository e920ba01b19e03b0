"""What a neural drafter among auto's sources is worth as the target's passes take longer.

python scripts/neural_sources.py --data PROMPTS --longer 0 --longer 20 --temperature 0.7

Each pass of the embedded model is made to take so many milliseconds longer, as a larger model's would; texts are
written by turns, and must be plain decoding's.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import foredraft
from foredraft.bench.tasks import load_tasks
from foredraft.contracts import CostCurve

TASKS = ("humaneval", "gsm8k", "mt_bench")
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {}),
    ("auto", {}),
    ("auto", {"model": "demo-draft"}),
    ("auto", {"drafter": "medusa"}),
    ("draft_tree", {}),
    ("medusa", {}),
)


def lengthened(milliseconds: float) -> foredraft.Generator:
    """Load the embedded model with passes that take so much longer, and a cost curve that knows it."""
    generator = foredraft.load("demo")
    known, forward = generator.cost, generator.target.forward

    def longer(*arguments: Any, **options: Any) -> Any:
        scores = forward(*arguments, **options)
        time.sleep(milliseconds / 1e3)
        return scores

    generator.target.forward = longer  # type: ignore[method-assign]  # the one thing that is changed
    seconds = tuple(each + milliseconds / 1e3 for each in known.seconds)
    generator._curve = CostCurve(known.rows, seconds)  # noqa: SLF001  # measuring it would leave it in the user's cache
    return generator


def main() -> None:
    """Print a line for each method and number of milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--longer", type=float, action="append", required=True, help="milliseconds; may be repeated")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=5, help="of each task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    prompts = [task.prompt for task in load_tasks(TASKS, arguments.data, arguments.prompts)]
    how = {"temperature": arguments.temperature, "seed": 0} if arguments.temperature else {}
    for milliseconds in arguments.longer:
        generator, taken, steps, tokens = lengthened(milliseconds), [0.0] * len(METHODS), [0.0] * len(METHODS), 0
        for number, prompt in enumerate([prompts[0], *prompts]):  # the first one is not counted: it loads and compiles
            expected = None
            for place, (method, options) in enumerate(METHODS):
                generator.use(method, options)
                start = time.perf_counter()
                found = generator.generate(prompt, max_new_tokens=arguments.max_new_tokens, **how)
                seconds = time.perf_counter() - start
                expected = expected if expected is not None else found.token_ids
                if found.token_ids != expected:
                    raise SystemExit(f"{method} {options} wrote another text than plain decoding.")
                if number:
                    taken[place] += seconds
                    steps[place] += len(found.token_ids) / found.statistics.tokens_per_target_step
            tokens += len(expected or ()) if number else 0
        for place, (method, options) in enumerate(METHODS):
            name = f"{method}:{json.dumps(options)}" if options else method
            print(
                f"{milliseconds:g} ms longer  {name:30} {taken[0] / taken[place]:.2f} times as fast, "
                f"{tokens / steps[place]:.2f} tokens a pass"
            )


if __name__ == "__main__":
    main()
