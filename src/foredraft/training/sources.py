"""Training texts as token ids, and their split into training and held-out texts; texts are never divided.

Reads rows with `messages` or `text`, with a tokenizer. Does not depend on models or batches.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator
from itertools import chain, takewhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from foredraft.corpus.documents import ReadReport, find_inputs, join_messages, read_documents
from foredraft.errors import UsageError

T = TypeVar("T")

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders of a source tree that are skipped: tests are repetitive, and installed packages have other licences."""
_CHAT_MARK = f"\0messages {secrets.token_hex(8)}\0"  # no text begins with it
_PROMPT_OF_TEXT = 48  # maximum tokens of a plain text's prompt, which the target continues; chosen
_LONGEST_OPEN = 1024  # maximum tokens of a text used as it is; chosen


class Source(NamedTuple):
    """A training text. Its key decides whether it is held out.

    If chats were held out individually, other answers to the same question would be trained on.
    """

    key: str  # the first message of a chat, otherwise the text
    prompt: list[int]  # for the target
    text: list[int]  # the whole text, with an end-of-text token


def read_sources(path: Path, tokenizer: Any, report: ReadReport) -> Iterator[Source]:
    """Yield the texts of a file (.jsonl, .parquet, .py, .txt, .md; see `corpus.documents`) or of a folder of them.

    Each prompt occurs once. In a folder, the folders named in `LEFT_OUT` are skipped. Rows that are not text and chats
    with roles other than user and assistant are skipped and counted in `report`. UsageError for a path that is missing,
    damaged, or of an unknown kind.
    """
    files = find_inputs([path])
    if path.is_dir():
        files = [file for file in files if not LEFT_OUT.intersection(file.relative_to(path).parts[:-1])]
    seen, begins = set(), True
    for piece in read_documents(files, report=report, render=_chat_as_text):
        skipped, begins = not begins, piece.complete
        if skipped:  # only a text's first piece is used
            continue
        is_chat = piece.text.startswith(_CHAT_MARK)
        chat = json.loads(piece.text.removeprefix(_CHAT_MARK)) if is_chat else []
        key = chat[0]["content"] if is_chat else piece.text
        if key in seen:
            continue
        seen.add(key)
        if is_chat:
            asked = list(takewhile(lambda each: each["role"] != "assistant", chat))
            try:
                prompt, text = _templated(tokenizer, asked, ask=True), _templated(tokenizer, chat, ask=False)
            except UsageError:
                report.unusable_rows += 1
                continue
        else:
            text = tokenizer(piece.text, truncation=True, max_length=_LONGEST_OPEN).input_ids
            prompt = text[: min(_PROMPT_OF_TEXT, (len(text) + 1) // 2)]
        if prompt:
            end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            yield Source(key, prompt, [*text[:_LONGEST_OPEN], *end])


def in_turns(readers: Iterable[Iterator[T]]) -> Iterator[T]:
    """Return the items of all readers, one of each in turn; none of them is false."""
    return filter(None, chain.from_iterable(zip_longest(*readers)))


def is_held_out(key: str, one_in: int) -> bool:
    """Return whether sources of `key` are held out: its hash, ignoring white space and case, is 0 modulo `one_in`."""
    plain = " ".join(key.split()).casefold()
    return int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest(), "big") % one_in == 0


def _chat_as_text(messages: list[dict[str, str]]) -> str:
    """Encode a chat as text that can be decoded; the reader counts and skips chats with other roles."""
    for message in messages:
        if message["role"] not in ("user", "assistant"):
            raise UsageError(f"A message has the role {message['role']!r}; it may be user or assistant.")
    return _CHAT_MARK + json.dumps(messages, ensure_ascii=False)


def _templated(tokenizer: Any, messages: list[dict[str, str]], *, ask: bool) -> list[int]:
    """Return a chat's ids, rendered with the tokenizer's chat template if it has one."""
    if getattr(tokenizer, "chat_template", None):
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        except Exception as error:  # a template may raise anything for a chat that it rejects
            raise UsageError(f"The chat template raised {type(error).__name__}: {error}.") from error
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    return list(tokenizer(join_messages(messages)).input_ids)
