"""What drafting is good for, and what it is not, on two texts: each written by transformers, plainly, and drafted.

Measures and words what was measured. Does not know the terminal, or how a model is prepared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from foredraft.api import Generator, Prompt
from foredraft.bench.method import Method
from foredraft.bench.metrics import first_difference
from foredraft.bench.peer import prepared_peer
from foredraft.bench.turns import write_by_turns
from foredraft.generation import Generation, Stream

_PAYS = 1.05
"""From this speed-up on the page says that drafting paid; less lies within the noise of one short text."""

_CODE = '''def load_orders(path):
    """Read the orders of a CSV file, one dictionary a row."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def total_of(orders):
    """Return the sum of all amounts."""
    total = 0.0
    for order in orders:
        total += float(order["amount"])
    return total


def by_customer(orders):
    """Return the orders of each customer."""
    groups = {}
    for order in orders:
        groups.setdefault(order["customer"], []).append(order)
    return groups


def print_report(path):
    """Print the total of each customer."""
    orders = load_orders(path)
    for customer, group in by_customer(orders).items():
        print(customer, total_of(group))
'''


@dataclass(frozen=True, slots=True)
class Scene:
    """A text to write.

    Attributes:
        title: what is written.
        prompt: what the user asks for.
        options: generation arguments.
        foreseeable: whether most of the text stands in the prompt.
    """

    title: str
    prompt: str
    options: Mapping[str, Any]
    foreseeable: bool


SCENES = (
    Scene(
        "A page of code, rewritten with a small change (greedy)",
        f"Rewrite this code, with the word customer replaced by client. Change nothing else.\n\n```python\n{_CODE}```",
        {"max_new_tokens": 240},
        foreseeable=True,
    ),
    Scene(
        "Fresh prose (temperature 0.7)",
        "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
        {"max_new_tokens": 160, "do_sample": True, "temperature": 0.7, "seed": 1},
        foreseeable=False,
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a scene.

    Attributes:
        scene: which.
        milliseconds: by `transformers`, `none` and the method: milliseconds a token, prompt included.
        method: the generator's method.
        drafted: the text as the method wrote it.
        same: whether plain decoding wrote the same ids.
        transformers_differs: the first token in which transformers' own text differs, counted from 1; 0 for none, None
            where texts are sampled, for which transformers draws otherwise.
    """

    scene: Scene
    milliseconds: Mapping[str, float]
    method: str
    drafted: Generation
    same: bool
    transformers_differs: int | None

    def sentence(self) -> str:
        """Say in one sentence, or two, how quick it was and why."""
        own = self.milliseconds[self.method]
        by_transformers, by_plain = (self.milliseconds[name] / own for name in ("transformers", "none"))
        text = "the same text" if self.same else "ANOTHER TEXT, which should not be: please report it"
        said = (
            f"{by_transformers:.1f} times as fast as transformers' generate, {by_plain:.1f} times our own plain "
            f"decoding; {text}."
        )
        counts = self.drafted.statistics
        if self.scene.foreseeable or by_plain >= _PAYS:
            kept = f"{counts.accepted} of its {counts.emitted} tokens were drafted"
            return f"{said} {kept}, so {counts.emitted} tokens took {counts.steps} passes of the model."
        return f"{said} Little of new prose can be foreseen: {counts.accepted} of {counts.emitted} tokens were drafted."


def perform(generator: Generator, scene: Scene, show: Callable[[Stream], None] = lambda _: None) -> Outcome:
    """Write a scene's text by transformers, plainly and by the generator's method, and time each.

    Args:
        generator: with the method to show; a model with a chat template.
        scene: what to write.
        show: is given the first drafted text as a stream.
    """
    prompt: Prompt = [{"role": "user", "content": scene.prompt}]
    options = {"seed": 0, **scene.options}
    written, plain = write_by_turns(generator, prompt, options, show)
    peer = prepared_peer(generator, Method("transformers", "transformers"))(prompt, options)
    own, drafted = plain[0].token_ids, written[0]
    place = first_difference(own, peer.token_ids)
    sampled = bool(options.get("do_sample"))
    return Outcome(
        scene,
        {
            "transformers": 1e3 * peer.total_seconds / len(peer.token_ids),
            "none": _milliseconds(plain),
            generator.method: _milliseconds(written),
        },
        generator.method,
        drafted,
        drafted.token_ids == own,
        None if sampled else (place + 1 if place < max(len(own), len(peer.token_ids)) else 0),
    )


def _milliseconds(runs: list[Generation]) -> float:
    return 1e3 * median(
        (run.statistics.prefill_seconds + run.statistics.decode_seconds) / run.statistics.emitted for run in runs
    )
