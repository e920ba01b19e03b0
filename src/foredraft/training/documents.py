"""Documents to learn from, and which of them are held out: always whole ones, all answers to a prompt together.

Knows rows with `messages` or `text`. Does not know tokenizers, models or batches.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.corpus.documents import ReadReport, read_documents
from foredraft.corpus.inputs import find_inputs
from foredraft.errors import UsageError

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders of a source tree that are not read: tests repeat themselves, and installed packages have other licences."""

_CHAT_MARK = "\0messages\0"


@dataclass(frozen=True, slots=True)
class Document:
    """One text, held out or trained on as a whole.

    Attributes:
        key: what decides the side; documents of one key are never separated. The prompt of a chat, the text otherwise.
        parts: (role, content) in order; the role is "user" or "assistant", or "" for text that is no chat.
    """

    key: str
    parts: tuple[tuple[str, str], ...]


def chat_document(messages: Sequence[Mapping[str, str]]) -> Document:
    """Make a document of a chat, a list of {"role", "content"}.

    All answers to one prompt get the prompt as their key: held out line by line, the training side would hold other
    answers to the same question, and the held-out loss would flatter.

    Raises:
        UsageError: there is no message, or a role is not user or assistant.
    """
    parts = tuple((message["role"], message["content"]) for message in messages)
    for role, _ in parts:
        if role not in ("user", "assistant"):
            raise UsageError(f"A message has the role {role!r}; the chat template knows user and assistant only.")
    if not parts:
        raise UsageError("A chat has no message; leave it out.")
    return Document(parts[0][1], parts)


def text_document(text: str) -> Document:
    """Make a document of plain text, which is its own key."""
    return Document(text, (("", text),))


def documents_in(path: Path, report: ReadReport) -> Iterator[Document]:
    """Yield the documents of a file (.jsonl, .parquet, .py, .txt, .md; see `corpus.documents`) or of a folder of them.

    In a folder, what lies below a folder named in `LEFT_OUT` is not read. Rows that are not text and chats with other
    roles than user and assistant are left out and counted in `report`.

    Raises:
        UsageError: the path is missing, damaged, or of an unknown kind.
    """
    files = find_inputs([path])
    if path.is_dir():
        files = [file for file in files if not LEFT_OUT.intersection(file.relative_to(path).parts[:-1])]
    pieces: list[str] = []
    for piece in read_documents(files, report=report, render=_chat_as_text):
        if piece.text.startswith(_CHAT_MARK):
            yield chat_document(json.loads(piece.text.removeprefix(_CHAT_MARK)))
            continue
        pieces.append(piece.text)
        if piece.complete:
            yield text_document("".join(pieces))
            pieces = []


def _chat_as_text(messages: list[dict[str, str]]) -> str:
    """Word a chat so that `documents_in` gets its messages back: the shard reader's documents are strings."""
    chat_document(messages)  # an unknown role is refused here, where the reader counts it and goes on
    return _CHAT_MARK + json.dumps(messages, ensure_ascii=False)


def is_held_out(key: str, one_in: int = 50) -> bool:
    """Say whether documents of `key` are held out: its hash, white space and case apart, is 0 modulo `one_in`."""
    plain = " ".join(key.split()).casefold()
    return int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest(), "big") % one_in == 0
