"""What drafting is good for, and what it is not, on two texts: each written by transformers, plainly, and drafted.

Measures, and puts what was measured into words. Does not know the terminal, or how a model is prepared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from foredraft.api import Generator, Prompt
from foredraft.bench.method import PEER, Method
from foredraft.bench.writer import PeerWriter
from foredraft.generation import Generation, Stream

ROUNDS = 3
"""Times that each text is written; the median counts."""

_WARM_UP_TOKENS = 16
_PAYS = 1.05  # a speed-up below this lies within the noise of one short text

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
    """A text to write, with generation arguments; it is predictable where most of it stands in the prompt."""

    title: str
    prompt: str
    options: Mapping[str, Any]
    predictable: bool


SCENES = (
    Scene(
        "A page of code, rewritten with a small change (greedy)",
        f"Rewrite this code, with the word customer replaced by client. Change nothing else.\n\n```python\n{_CODE}```",
        {"max_new_tokens": 240},
        predictable=True,
    ),
    Scene(
        "Fresh prose (temperature 0.7)",
        "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
        {"max_new_tokens": 160, "do_sample": True, "temperature": 0.7, "seed": 1},
        predictable=False,
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
    """

    scene: Scene
    milliseconds: Mapping[str, float]
    method: str
    drafted: Generation
    same: bool

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
        if self.scene.predictable or by_plain >= _PAYS:
            kept = f"{counts.accepted} of its {counts.emitted} tokens were drafted"
            return f"{said} {kept}, so {counts.emitted} tokens took {counts.steps} passes of the model."
        return (
            f"{said} Little of new prose can be predicted: {counts.accepted} of {counts.emitted} tokens were drafted."
        )


def perform(generator: Generator, scene: Scene, show: Callable[[Stream], None] = lambda _: None) -> Outcome:
    """Write a scene's text by transformers, plainly and by the generator's method, and time each.

    The model needs a chat template; `show` is given the first drafted text as a stream.
    """
    prompt: Prompt = [{"role": "user", "content": scene.prompt}]
    options = {"seed": 0, **scene.options}
    written, plain = write_in_rounds(generator, prompt, options, show)
    peer = PeerWriter(generator, Method(PEER, PEER)).written(prompt, options)
    milliseconds = {
        PEER: 1e3 * peer.seconds_per_token,
        "none": _milliseconds(plain),
        generator.method: _milliseconds(written),
    }
    return Outcome(scene, milliseconds, generator.method, written[0], written[0].token_ids == plain[0].token_ids)


def write_in_rounds(
    generator: Generator, prompt: Prompt, options: Mapping[str, Any], show: Callable[[Stream], None],
    tell: Callable[[float], None] = lambda _: None,
) -> tuple[list[Generation], list[Generation]]:  # fmt: skip
    """Write a text with the generator's method and with plain decoding, each `ROUNDS` times.

    A short text is written first, as what is loaded and compiled once belongs to none. Each text begins with everything
    forgotten: it would else be drafted from what was learned when it was written before.

    Args:
        generator: with the method.
        prompt: as `Generator.generate` takes it.
        options: generation arguments, `seed` among them where the text is sampled.
        show: is given the first drafted text as a stream; what it leaves is read here.
        tell: told the share of the texts that are written.

    Returns:
        The drafted texts and the plain ones, as they were written.
    """
    plain = Generator(generator.target, generator.tokenizer, method="none", options={}, nodes=None)
    brief = {**options, "max_new_tokens": min(_WARM_UP_TOKENS, options.get("max_new_tokens", _WARM_UP_TOKENS))}
    for each in (generator, plain):
        each.generate(prompt, **brief)
    generator.forget()
    stream = generator.stream(prompt, **options)
    show(stream)
    for _ in stream:
        pass
    drafted, undrafted = [stream.generation], list[Generation]()
    by_turns = [(generator, drafted), (plain, undrafted)]
    rest = [each for number in range(ROUNDS) for each in (by_turns if number % 2 == 0 else by_turns[::-1])][1:]
    for number, (writer, texts) in enumerate(rest):
        tell(number / len(rest))
        generator.forget()
        texts.append(writer.generate(prompt, **options))
    return drafted, undrafted


def _milliseconds(runs: list[Generation]) -> float:
    return 1e3 * median(
        (run.statistics.prefill_seconds + run.statistics.decode_seconds) / run.statistics.emitted for run in runs
    )
