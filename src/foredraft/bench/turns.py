"""One text, written with a method and plainly by turns, several times each: what a command shows of a single prompt.

Knows the generator's surface. What many prompts need (pairs of slices, cells, intervals) is the runner's.
"""

from collections.abc import Callable, Mapping
from typing import Any

from foredraft.api import Generator, Prompt
from foredraft.generation import Generation, Stream

ROUNDS = 3
"""Times that each is written; the median counts."""
_WARM_UP_TOKENS = 16


def write_by_turns(
    generator: Generator,
    prompt: Prompt,
    options: Mapping[str, Any],
    show: Callable[[Stream], None],
    tell: Callable[[float], None] = lambda _: None,
) -> tuple[list[Generation], list[Generation]]:
    """Write a text with the generator's method and with plain decoding, each `ROUNDS` times.

    What is loaded and compiled once belongs to no text, so a short one comes before. Else a text would be drafted by
    what the target said when it wrote it before, so each begins with everything forgotten.

    Args:
        generator: with the method.
        prompt: as `Generator.generate` takes it.
        options: generation arguments, `seed` among them where the text is sampled.
        show: is given the first drafted text as a stream; what it leaves is read here.
        tell: told the share of the texts that are written.

    Returns:
        The drafted texts and the plain ones, in the order in which they were written.
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
    drafted: list[Generation] = [stream.generation]
    undrafted: list[Generation] = []
    rest = [drafts for number in range(ROUNDS) for drafts in ((True, False) if number % 2 == 0 else (False, True))][1:]
    for number, drafts in enumerate(rest):
        tell(number / len(rest))
        generator.forget()
        written = (generator if drafts else plain).generate(prompt, **options)
        (drafted if drafts else undrafted).append(written)
    return drafted, undrafted
