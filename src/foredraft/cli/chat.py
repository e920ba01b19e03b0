"""`foredraft chat`: a conversation with one message per line; drops the oldest turns when the window is full.

Does not depend on how answers are generated.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import flags
from foredraft.cli.flags import generation_flag
from foredraft.cli.generate import write
from foredraft.cli.job import Job, opening
from foredraft.cli.screen import Ink, say
from foredraft.errors import UsageError

if TYPE_CHECKING:
    from foredraft.api import Generator

_RESET = "/reset"
_ANSWER_SHARE = 4  # at most 1 / this of the window is kept free for the answer (chosen)


def chat(
    prompt: Annotated[str | None, typer.Argument(help="The first message; default: read lines")] = None,
    *,
    job: Job,
    memory: flags.MemoryOption = None,
    max_new_tokens: Annotated[int | None, generation_flag("max_new_tokens")] = None,
    temperature: Annotated[float | None, generation_flag("temperature")] = None,
    top_p: Annotated[float | None, generation_flag("top_p")] = None,
    seed: Annotated[int | None, generation_flag("seed", "seed of the sampling; default: random, and reported")] = None,
    system: flags.SystemOption = None,
    color: flags.ColorOption = None,
) -> None:
    """Chat: one message per line, an empty line ends; /reset starts over, Ctrl-C stops an answer."""
    if prompt == "-":
        raise UsageError("chat reads the conversation from standard input; give the first message as PROMPT, or none.")
    if sys.stdin is None:
        raise UsageError("Standard input is closed, and chat reads messages from it; foredraft generate answers one.")
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    generator = job.load(job.config(memory=memory), options)
    try:
        converse(generator, options, system, prompt, color=color)
    finally:
        generator.save()


def converse(
    generator: "Generator", options: Mapping[str, Any], system: str | None, first: str | None = None,
    color: bool | None = None,
) -> None:  # fmt: skip
    """Answer the first message, if given, then each line; UsageError without a chat template or any line."""
    if not getattr(generator.tokenizer, "chat_template", None):
        raise UsageError("This model's tokenizer has no chat template, so it cannot chat; use foredraft generate.")
    messages, has_line, kept = opening(system), False, None
    for line in _lines(first):
        if not line.strip():
            break
        has_line = True
        if any("\ud800" <= letter <= "\udfff" for letter in line):  # surrogates, see `_lines`
            say("The line is not UTF-8 and is skipped; convert it first.")
            continue
        if line.strip() == _RESET:
            messages = opening(system)
            say("The conversation starts over.", "dim")
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages = _fitting(generator, options, messages)
        except UsageError as error:  # continue with the next message
            messages.pop()
            say(str(error))
            continue
        kept = generator.conversation() if kept is None else kept  # memory may have become free
        generation, _ = write(generator, options, messages, Ink(color, generator.drafter.source_names), kept)
        messages.append({"role": "assistant", "content": generation.text})
    if not has_line and not sys.stdin.isatty():
        raise UsageError("chat found no line to answer; run it on a terminal, or pipe one message per line.")


def _lines(first: str | None) -> Iterator[str]:
    """Yield the messages; invalid UTF-8 in a piped line becomes surrogates, so that later lines are still read."""
    if first is not None:
        yield first
    if not sys.stdin.isatty():
        for line in getattr(sys.stdin, "buffer", sys.stdin):
            yield (line.decode("utf-8", "surrogateescape") if isinstance(line, bytes) else line).rstrip("\r\n")
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # its import adds line editing and history to `input`
    while True:
        try:
            yield input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return


def _fitting(
    generator: "Generator", options: Mapping[str, Any], messages: list[dict[str, str]]
) -> list[dict[str, str]]:
    """Drop the oldest turns until there is room for an answer; UsageError if the last message alone is too long."""
    window = generator.target.window
    if window is None:
        return messages
    room = min(generator.arguments(options)["max_new_tokens"], window // _ANSWER_SHARE)
    start = int(messages[0]["role"] == "system")
    kept = list(messages)
    while (length := len(generator.encode(kept))) + room > window and len(kept) - start > 1:
        del kept[start : start + 2]  # a question and its answer
    if length >= window:
        raise UsageError(f"The message has {length} tokens and the model's window is {window}; send a shorter one.")
    dropped = (len(messages) - len(kept)) // 2
    if dropped:
        turns = "turn was" if dropped == 1 else f"{dropped} turns were"
        say(f"The conversation exceeds the model's window of {window} tokens; the oldest {turns} dropped.", "yellow")
    return kept
