"""From text files to token streams: documents, hold-out by whole documents, a byte-level BPE tokenizer, packed ids.

Knows rows with `messages` or `text`, chat roles and the tokenizer. Does not know models, windows, batches or how often
a domain is repeated; `packing` reads what is written here.

A prepared folder holds `tokenizer.json`, and for each domain `train-NAME.u16` and `held-NAME.u16`: the ids of its
documents one after another, each ended by `<|endoftext|>` (id 0), as little-endian uint16. `manifest.json` is written
last and names them all, so a folder without it is unfinished.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foredraft.corpus.documents import ReadReport, read_documents
from foredraft.corpus.inputs import find_inputs
from foredraft.errors import StoreError, UsageError

END, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT)
"""In the order of their ids: 0, 1, 2. `<|endoftext|>` begins, separates and ends documents."""

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders of a source tree that are not read: tests repeat themselves, and installed packages have other licences."""

FORMAT_VERSION = 1
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

    @property
    def rendered(self) -> str:
        """The text as the tokenizer's training sees it: contents only, no special tokens."""
        return "\n".join(content for _, content in self.parts)


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """How files become token streams.

    Attributes:
        vocabulary: size of the tokenizer, special tokens and the 256 bytes included; at most 65,536 (ids are uint16).
        hold_out_one_in: a document is held out when the hash of its key is 0 modulo this.
        tokenizer_characters: the tokenizer is trained on about this many characters of each domain's training side.
    """

    vocabulary: int = 8192
    hold_out_one_in: int = 50
    tokenizer_characters: int = 20_000_000

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        if not 256 + len(SPECIAL_TOKENS) <= self.vocabulary <= 1 << 16:
            raise UsageError(
                f"vocabulary is {self.vocabulary}; give 259 (bytes and special tokens) to 65,536 (ids are uint16)."
            )
        if self.hold_out_one_in < 2:
            raise UsageError(f"hold_out_one_in is {self.hold_out_one_in}; below 2 nothing is left to train on.")


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


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of `vocabulary` ids, `SPECIAL_TOKENS` first; it can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load `tokenizer.json` (or the one in a model folder), set so that special tokens spelt out in a text stay text.

    Raises:
        UsageError: there is none, or its first ids are not `SPECIAL_TOKENS`.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"There is no tokenizer at {file}. Give a tokenizer.json or a model folder that holds one.")
    tokenizer: Tokenizer = Tokenizer.from_file(str(file))
    if [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] != list(range(len(SPECIAL_TOKENS))):
        raise UsageError(
            f"The tokenizer {file} does not fit this recipe, whose first ids are {', '.join(SPECIAL_TOKENS)}. "
            "Train one with 'prepare', or give another."
        )
    # Otherwise a document that mentions <|endoftext|> would end in its middle.
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(document: Document, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Render a document with the chat template and turn it into ids.

    Returns:
        ids: ended by `<|endoftext|>`.
        scored: for each id, whether it belongs to what a model would write: an assistant's contents with the end after
            it, or all of a text that is no chat.
    """
    ids: list[int] = []
    scored: list[bool] = []
    for role, content in document.parts:
        if role:
            ids.append(SPECIAL_TOKENS.index(f"<|{role}|>"))
            scored.append(False)
        piece = tokenizer.encode(content, add_special_tokens=False).ids
        ids.extend(piece)
        scored.extend([role != "user"] * len(piece))
    ids.append(SPECIAL_TOKENS.index(END))
    scored.append(bool(document.parts) and document.parts[-1][0] != "user")
    return ids, scored


def prepare(
    sources: Mapping[str, Callable[[], Iterator[Document]]],
    folder: Path,
    options: PrepareOptions,
    tokenizer: Tokenizer | None = None,
) -> dict[str, Any]:
    """Write the prepared folder and return its manifest.

    Args:
        sources: domain name (letters, digits, _ and -) -> a function that reads the domain's documents from their
            beginning; called twice.
        folder: made if needed.
        options: sizes and the hold-out.
        tokenizer: one to use as it is, from `load_tokenizer`; by default one is trained on the training side.

    Raises:
        UsageError: a source without documents, a row of an unknown form, or a tokenizer of more than 65,536 ids.
    """
    for name in sources:
        if not re.fullmatch(r"[\w-]+", name):
            raise UsageError(f"The domain {name!r} cannot name a file. Use letters, digits, _ and - only.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)  # from here on the folder is unfinished until the end
    if tokenizer is None:
        tokenizer = train_tokenizer(_training_texts(sources, options), options.vocabulary)
    if tokenizer.get_vocab_size() > 1 << 16:
        raise UsageError(
            f"The tokenizer has {tokenizer.get_vocab_size()} ids; ids are stored as uint16, at most 65,536."
        )
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    tokenizer = load_tokenizer(folder)
    domains = {
        name: _write_domain(folder, name, read(), tokenizer, options.hold_out_one_in) for name, read in sources.items()
    }
    manifest = {
        "version": FORMAT_VERSION,
        "options": asdict(options),
        "vocabulary": tokenizer.get_vocab_size(),
        "tokenizer_sha256": hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        "domains": domains,
    }
    write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
    return manifest


def _training_texts(sources: Mapping[str, Callable[[], Iterator[Document]]], options: PrepareOptions) -> Iterator[str]:
    """Yield the first `tokenizer_characters` of every domain's training side."""
    for read in sources.values():
        characters = 0
        for document in read():
            if characters >= options.tokenizer_characters:
                break
            if not is_held_out(document.key, options.hold_out_one_in):
                characters += len(document.rendered)
                yield document.rendered


def _write_domain(
    folder: Path, name: str, documents: Iterator[Document], tokenizer: Tokenizer, one_in: int
) -> dict[str, Any]:
    """Write both sides of a domain and return what the manifest says of it."""
    sides = ("train", "held")
    counts = {side: {"documents": 0, "tokens": 0} for side in sides}
    digest = hashlib.sha256()
    partial = {side: folder / f"{side}-{name}.u16.partial-{os.getpid()}" for side in sides}
    with partial["train"].open("wb") as train, partial["held"].open("wb") as held:
        files = {"train": train, "held": held}
        for document in documents:
            side = "held" if is_held_out(document.key, one_in) else "train"
            ids = np.asarray(encode(document, tokenizer)[0], "<u2").tobytes()
            files[side].write(ids)
            counts[side]["documents"] += 1
            counts[side]["tokens"] += len(ids) // 2
            if side == "train":
                digest.update(ids)
    for side in sides:
        partial[side].replace(folder / f"{side}-{name}.u16")
    if not counts["train"]["documents"]:
        raise UsageError(f"The domain {name!r} has no document to train on. Check the files that it was given.")
    return {"train": counts["train"], "held": counts["held"], "train_sha256": digest.hexdigest()}


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, then move it there, so that a crash leaves the old file or the new one.

    Raises:
        StoreError: the folder cannot be written to.
    """
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror}). Check the folder and its free space."
        ) from error
