"""The demo: three texts, from predictable to not, each timed with transformers, plain decoding and drafting.

Does not depend on the terminal or on how a model is loaded.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from foredraft.api import Generator, Prompt
from foredraft.bench.cell import Writing
from foredraft.bench.method import PEER
from foredraft.bench.runner import PeerWriter
from foredraft.generation import Generation, Stream

ROUNDS = 3  # repetitions of each text (chosen); the median is reported
PEER_ROUNDS = 2  # as `ROUNDS`, of transformers, whose texts take 10 s each: three would take the demo too long (chosen)

_WARM_UP_TOKENS = 16  # chosen

_LETTER = (Path(__file__).parent / "data" / "letter.txt").read_text(encoding="utf-8").strip()


@dataclass(frozen=True, slots=True)
class Scene:
    """A text to generate, with its arguments, and what it shows."""

    title: str
    prompt: str
    options: Mapping[str, Any]
    shows: str


SCENES = (
    Scene(
        "A file rewritten with a small change, the old file as prediction (greedy)",
        f"Replace Friday by Monday in this letter, and write the whole letter:\n\n{_LETTER}",
        {"max_new_tokens": 240, "prediction": _LETTER},
        "what is known beforehand is only verified",
    ),
    Scene(
        "New code (greedy)",
        "Write a Python class for a bank account with the methods deposit, withdraw and balance, and an example.",
        {"max_new_tokens": 240},
        "code repeats itself and what the model often writes",
    ),
    Scene(
        "Fresh prose (temperature 0.7)",
        "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
        {"max_new_tokens": 160, "do_sample": True, "temperature": 0.7, "seed": 1},
        "new prose is hard to predict",
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measurements of a scene."""

    scene: Scene
    milliseconds: Mapping[str, float]  # per token, including prefill; by `transformers`, `none` and the method
    method: str
    drafted: Generation
    same: bool  # whether plain decoding emitted the same ids

    def sentence(self) -> str:
        own, counts = self.milliseconds[self.method], self.drafted.statistics
        by_transformers, by_plain = (self.milliseconds[name] / own for name in (PEER, "none"))
        text = "the same text" if self.same else "A DIFFERENT TEXT, which is a bug: please report it"
        return (
            f"{by_plain:.1f} times our own plain decoding, {by_transformers:.1f} times as fast as transformers' "
            f"generate, {counts.tokens_per_target_step:.1f} tokens a step; {text}: {self.scene.shows}."
        )


def perform(generator: Generator, scene: Scene, show: Callable[[Stream], None] = lambda _: None) -> Outcome:
    """Time a scene with transformers, plain decoding and the generator's method.

    The model needs a chat template. `show` receives the first drafted text as a stream.
    """
    prompt: Prompt = [{"role": "user", "content": scene.prompt}]
    options = {"seed": 0, **scene.options}
    written, plain = write_in_rounds(generator, prompt, options, show)
    writer, given = PeerWriter(generator, {}), _without_prediction(options)
    writer.written(prompt, {**given, "max_new_tokens": _WARM_UP_TOKENS})
    peer = [writer.written(prompt, given) for _ in range(PEER_ROUNDS)]
    texts: dict[str, Sequence[Generation | Writing]] = {PEER: peer, "none": plain, generator.method: written}
    milliseconds = {name: median(map(_milliseconds, repetitions)) for name, repetitions in texts.items()}
    return Outcome(scene, milliseconds, generator.method, written[0], written[0].token_ids == plain[0].token_ids)


def _milliseconds(text: Generation | Writing) -> float:
    counts = text.statistics
    return 1e3 * (counts.prefill_seconds + counts.decode_seconds) / counts.emitted


def write_in_rounds(
    generator: Generator, prompt: Prompt, options: Mapping[str, Any], show: Callable[[Stream], None]
) -> tuple[list[Generation], list[Generation]]:
    """Generate a text with the generator's method and with plain decoding, each `ROUNDS` times; return both lists.

    Plain decoding has no use for a prediction, and is not given it. A short text first loads and compiles what is
    needed once. The drafter is reset before each text, because it would otherwise draft from the repetition before.
    `show` receives the first drafted text as a stream, whose rest is consumed here.
    """
    plain = Generator(generator.target, generator.tokenizer, method="none")
    given = {generator: options, plain: _without_prediction(options)}
    for each in (generator, plain):
        each.generate(prompt, **{**given[each], "max_new_tokens": _WARM_UP_TOKENS})
    generator.forget()
    stream = generator.stream(prompt, **options)
    show(stream)
    deque(stream, maxlen=0)
    texts = {generator: [stream.generation], plain: list[Generation]()}
    order = [each for number in range(ROUNDS) for each in (generator, plain)[:: (-1) ** number]]
    for each in order[1:]:
        generator.forget()
        texts[each].append(each.generate(prompt, **given[each]))
    return texts[generator], texts[plain]


def _without_prediction(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in options.items() if name != "prediction"}
