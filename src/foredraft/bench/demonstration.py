"""The demo: three texts, from predictable to not, each timed with transformers, plain decoding and drafting.

Does not depend on the terminal or on how a model is loaded.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from foredraft.api import Generator, Prompt
from foredraft.bench.cell import Writing
from foredraft.bench.method import PEER
from foredraft.bench.runner import PeerWriter
from foredraft.generation import Generation, Stream

ROUNDS = 2  # repetitions of each text; the median is reported. transformers takes 10 s for each (chosen)

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
    without = {name: each for name, each in options.items() if name != "prediction"}  # others have no use for it
    plain, peer = Generator(generator.target, generator.tokenizer, method="none"), PeerWriter(generator, {})
    short = {"max_new_tokens": _WARM_UP_TOKENS}  # loads and compiles what is needed once
    generator.generate(prompt, **options | short)
    plain.generate(prompt, **without | short)
    peer.written(prompt, without | short)
    generator.forget()  # else it would draft from the text before
    stream = generator.stream(prompt, **options)
    show(stream)
    deque(stream, maxlen=0)
    drafted = stream.generation
    texts: dict[str, list[Generation | Writing]] = {PEER: [], "none": [], generator.method: [drafted]}
    for _ in range(ROUNDS):
        texts[PEER].append(peer.written(prompt, without))
        texts["none"].append(plain.generate(prompt, **without))
        generator.forget()
        texts[generator.method].append(generator.generate(prompt, **options))
    milliseconds = {name: median(map(_milliseconds, repetitions)) for name, repetitions in texts.items()}
    return Outcome(scene, milliseconds, generator.method, drafted, texts["none"][0].token_ids == drafted.token_ids)


def _milliseconds(text: Generation | Writing) -> float:
    counts = text.statistics
    return 1e3 * (counts.prefill_seconds + counts.decode_seconds) / counts.emitted
