"""Documents from text files, JSON lines and Parquet, a piece at a time, and their token ids.

Knows file formats and the `tokenizers` library. Does not know what the tokens are wanted for, how a chat is worded (a
`render` function is given), or any model. Memory is bounded whatever the files' sizes, but for one line of JSON.
"""

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from foredraft.errors import UsageError

Render = Callable[[list[dict[str, str]]], str]
"""Words a chat, a list of {"role", "content"}, as text; raises ValueError for one that it cannot word."""

DOCUMENT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*DOCUMENT_SUFFIXES, ".jsonl", ".parquet")
_BLOCK_BYTES = 4 << 20
_PARQUET_ROWS = 256


class Document(NamedTuple):
    """A document, or a piece of one too long to hold.

    Attributes:
        text: its text.
        consumed: bytes of the inputs, as they lie on disk (compressed), that had been read when it was complete;
            counted from the first input on.
        complete: False where the next item continues the same document.
    """

    text: str
    consumed: int
    complete: bool = True


class TokenPiece(NamedTuple):
    """Token ids of a document, or of a piece of one: uint32[n], and the document's `consumed` and `complete`."""

    ids: npt.NDArray[np.uint32]
    consumed: int
    complete: bool


@dataclass(slots=True)
class ReadReport:
    """What reading met; filled while documents are taken.

    Attributes:
        files: files opened.
        documents: documents yielded.
        broken_lines: lines of .jsonl files that are not JSON.
        unusable_rows: rows without a usable `text` or `messages`, or whose chat could not be worded.
        empty_documents: documents of white space only.
    """

    files: int = 0
    documents: int = 0
    broken_lines: int = 0
    unusable_rows: int = 0
    empty_documents: int = 0

    @property
    def skipped(self) -> int:
        """How many lines, rows and documents were left out."""
        return self.broken_lines + self.unusable_rows + self.empty_documents


def join_messages(messages: list[dict[str, str]]) -> str:
    """Word a chat as lines `role: content`, where no chat template is known."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


def text_documents(texts: Iterable[str]) -> Iterator[Document]:
    """Yield the non-empty `texts` as documents; their bytes in UTF-8 count as consumed."""
    consumed = 0
    for text in texts:
        clean = _without_surrogates(text)
        consumed += len(clean.encode())
        if clean.strip():
            yield Document(clean, consumed)


# --- inputs


def find_inputs(inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files to read: those given, and those of a supported kind in the folders given, at any depth.

    A folder's files come in sorted order, without hidden files and folders; a file met twice is taken once.

    Raises:
        UsageError: an input is missing, of an unsupported kind, or a folder without any supported file.
    """
    found: dict[Path, Path] = {}
    for given in map(Path, inputs):
        if given.is_dir():
            files = sorted(path for path in given.rglob("*") if _wanted(path.relative_to(given)) and path.is_file())
            if not files:
                raise UsageError(f"The folder {given} has no file ending in {', '.join(SUFFIXES)} (or those with .gz).")
        elif not given.exists():
            raise UsageError(f"The input {given} does not exist. Check its name.")
        elif not _kind(given):
            raise UsageError(
                f"The input {given} is of a kind that cannot be read. Give files ending in {', '.join(SUFFIXES)}, "
                "any but .parquet with .gz behind it too, or folders of them."
            )
        else:
            files = [given]
        for path in files:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def total_bytes(files: Iterable[Path]) -> int:
    """Return how many bytes the files have on disk, which `Document.consumed` runs up to."""
    return sum(path.stat().st_size for path in files)


def _kind(path: Path) -> str:
    """Return the supported suffix of a file, without .gz, or an empty string."""
    name = path.name.lower()
    bare = name.removesuffix(".gz")
    kind = next((suffix for suffix in SUFFIXES if bare.endswith(suffix)), "")
    return "" if kind == ".parquet" and bare != name else kind


def _wanted(path: Path) -> bool:
    return bool(_kind(path)) and not any(part.startswith(".") for part in path.parts)


# --- documents


def read_documents(
    files: Sequence[Path], *, report: ReadReport, render: Render = join_messages, strict: bool = False
) -> Iterator[Document]:
    """Yield the files' documents in order. Invalid UTF-8 is replaced.

    A .txt, .md or .py file is one document, in pieces of a few MiB; a line of .jsonl or a row of .parquet is one, from
    its field `text` (a string) or `messages` (a list of {"role", "content"}).

    Args:
        files: from `find_inputs`.
        report: counts what is read, and what is skipped.
        render: words a chat.
        strict: raise at the first line, row or document that would be skipped.

    Raises:
        UsageError: a file that cannot be read, or what `strict` refuses.
    """
    before = 0
    for path in files:
        report.files += 1
        reader = _Reader(path, report, render, strict)
        kind = _kind(path)
        try:
            size = path.stat().st_size
            if kind == ".parquet":
                documents = reader.parquet(size)
            else:
                documents = reader.lines() if kind == ".jsonl" else reader.whole_file()
            for text, consumed, complete in documents:
                report.documents += complete
                yield Document(_without_surrogates(text), before + consumed, complete)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UsageError(f"The input {path} is damaged ({error}). Leave it out or get it again.") from error
        except OSError as error:
            raise UsageError(f"The input {path} cannot be read ({error.strerror or error}). Leave it out.") from error
        before += size


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one file; each method yields documents whose `consumed` counts this file's bytes only."""

    path: Path
    report: ReadReport
    render: Render
    strict: bool

    def whole_file(self) -> Iterator[Document]:
        """Yield the file as one document, in pieces cut at line ends."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        held, blank = "", True
        with self.path.open("rb") as raw, _unpacked(self.path, raw) as file:
            block = file.read(_BLOCK_BYTES)
            while following := file.read(_BLOCK_BYTES) if block else b"":
                held += decoder.decode(block)
                cut = _cut(held, len(held))
                blank = blank and not held[:cut].strip()
                yield Document(held[:cut], raw.tell(), False)
                held, block = held[cut:], following
            held += decoder.decode(block, final=True)
            if blank and not held.strip():
                self._skip("empty_documents", "there is no text")
            else:
                yield Document(held, raw.tell())

    def lines(self) -> Iterator[Document]:
        """Yield one document for each line of JSON."""
        with self.path.open("rb") as raw, _unpacked(self.path, raw) as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8", "replace")
                if not text.strip():
                    continue
                try:
                    row = json.loads(text)
                except (ValueError, RecursionError) as error:
                    self._skip("broken_lines", f"line {number} is not JSON ({error})")
                    continue
                yield from self._row(row, raw.tell(), f"line {number}")

    def parquet(self, size: int) -> Iterator[Document]:
        """Yield one document for each row, reading row group by row group."""
        import pyarrow as pa  # slow to import, and few inputs need it
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path) as file:
                columns = [name for name in ("text", "messages") if name in file.schema_arrow.names]
                if not columns:
                    raise UsageError(f"The input {self.path} has no column 'text' or 'messages'. Leave it out.")
                row, rows = 0, max(file.metadata.num_rows, 1)
                for group in range(file.num_row_groups):
                    for batch in file.iter_batches(_PARQUET_ROWS, [group], columns):
                        for values in batch.to_pylist():
                            row += 1
                            yield from self._row(values, size * row // rows, f"row {row}")
        except pa.ArrowException as error:
            raise UsageError(f"The input {self.path} is damaged ({error}). Leave it out or get it again.") from error

    def _row(self, row: Any, consumed: int, place: str) -> Iterator[Document]:
        """Yield a row's document, if it has one."""
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            messages = row.get("messages") if isinstance(row, dict) else None
            if not _is_chat(messages):
                self._skip("unusable_rows", f"{place} has no usable field 'text' or 'messages'")
                return
            try:
                text = self.render(messages)
            except ValueError as error:
                self._skip("unusable_rows", f"the chat of {place} cannot be worded ({error})")
                return
        if text.strip():
            yield Document(text, consumed)
        else:
            self._skip("empty_documents", f"{place} has no text")

    def _skip(self, counter: str, why: str) -> None:
        """Count what is left out, or refuse it."""
        if self.strict:
            raise UsageError(f"In {self.path}, {why}. Mend it, or read without --strict to skip it.")
        setattr(self.report, counter, getattr(self.report, counter) + 1)


def _unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    """Return the file's content as a stream."""
    return gzip.GzipFile(fileobj=raw) if path.name.lower().endswith(".gz") else raw  # type: ignore[return-value]  # it reads


def _is_chat(messages: Any) -> TypeGuard[list[dict[str, str]]]:
    return isinstance(messages, list) and len(messages) > 0 and all(map(_is_message, messages))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(field), str) for field in ("role", "content"))


def _without_surrogates(text: str) -> str:
    r"""Return `text` with lone surrogates (JSON's ``\ud800``), which no tokenizer takes, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# --- token ids


def _cut(text: str, limit: int) -> int:
    """Return where to cut `text`, at most at `limit`: behind its last line end, else before its last space."""
    for mark, behind in (("\n", 1), (" ", 0)):
        if (at := text.rfind(mark, 1, limit)) > 0:
            return at + behind
    return limit


def _pieces(text: str, limit: int) -> Iterator[str]:
    start = 0
    while len(text) - start > limit:
        piece = text[start : start + limit]
        cut = _cut(piece, limit)
        yield piece[:cut]
        start += cut
    yield text[start:]


def tokenize_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    batch_characters: int = 4 << 20,
    piece_characters: int = 1 << 20,
) -> Iterator[TokenPiece]:
    """Yield the documents' token ids, without special tokens added, in order.

    A long text is cut at line ends before it is tokenised, so tokens that would span such a cut are not seen as one.

    Args:
        documents: from `read_documents`.
        tokenizer: its padding and truncation settings are ignored; it is not changed.
        batch_characters: documents are tokenised together up to this many characters.
        piece_characters: the longest text that is tokenised in one go.
    """
    if tokenizer.padding is not None or tokenizer.truncation is not None:
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        tokenizer.no_padding()
        tokenizer.no_truncation()
    batch: list[Document] = []
    size = 0
    for document in documents:
        for piece in _pieces(document.text, piece_characters):
            if batch and size + len(piece) > batch_characters:
                yield from _encoded(batch, tokenizer)
                batch, size = [], 0
            batch.append(Document(piece, document.consumed, False))
            size += len(piece)
        batch[-1] = batch[-1]._replace(complete=document.complete)
    yield from _encoded(batch, tokenizer)


def _encoded(batch: list[Document], tokenizer: Tokenizer) -> Iterator[TokenPiece]:
    encodings = tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
    for document, encoding in zip(batch, encodings, strict=True):
        yield TokenPiece(np.array(encoding.ids, np.uint32), document.consumed, document.complete)
