"""Documents from text files, JSON lines and Parquet, a piece at a time.

Knows file formats. Does not know what the documents are wanted for, how a chat is worded (a `render` function is
given), or any tokenizer or model. Memory is bounded whatever the files' sizes, but for one line of JSON.
"""

import codecs
import contextlib
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

from foredraft.corpus.inputs import Part, input_kind, is_packed, unreadable, whole_part
from foredraft.errors import UsageError

Render = Callable[[list[dict[str, str]]], str]
"""Words a chat, a list of {"role", "content"}, as text; raises ValueError for one that it cannot word."""

_BLOCK_BYTES = 4 << 20
_PARQUET_ROWS = 256
_CONTROLS = bytes({*range(1, 32), 127} - set(b"\t\n\v\f\r\x1b"))
_MOST_CONTROLS = 0.02  # of a text's bytes; a twelfth of random bytes are control characters


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


@dataclass(slots=True)
class ReadReport:
    """What reading met; filled while documents are taken.

    Attributes:
        files: files opened.
        documents: documents yielded.
        broken_lines: lines of .jsonl files that are not JSON.
        unusable_rows: rows without a usable `text` or `messages`, or whose chat could not be worded.
        empty_documents: documents of white space only.
        binary_files: .txt, .md and .py files that hold no text.
    """

    files: int = 0
    documents: int = 0
    broken_lines: int = 0
    unusable_rows: int = 0
    empty_documents: int = 0
    binary_files: int = 0

    @property
    def skipped(self) -> int:
        """How many files, lines, rows and documents were left out."""
        return self.broken_lines + self.unusable_rows + self.empty_documents + self.binary_files


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


# --- reading


def read_documents(
    files: Iterable[Path], *, report: ReadReport, render: Render = join_messages, strict: bool = False
) -> Iterator[Document]:
    """Yield the documents of whole files, as `read_parts` does.

    Args:
        files: from `find_inputs`.
        report: counts what is read, and what is skipped.
        render: words a chat.
        strict: raise at the first line, row or document that would be skipped.

    Raises:
        UsageError: a file that cannot be read, or what `strict` refuses.
    """
    return read_parts(map(whole_part, files), report=report, render=render, strict=strict)


def read_parts(
    parts: Iterable[Part], *, report: ReadReport, render: Render = join_messages, strict: bool = False
) -> Iterator[Document]:
    """Yield the parts' documents in order; invalid UTF-8 is replaced.

    A .txt, .md or .py file is one document, in pieces of a few MiB; it is skipped where the first has a zero byte or
    many control characters. A line of .jsonl or a row of .parquet is one, from its field `text` (a string) or
    `messages` (a list of {"role", "content"}). A range of a .jsonl file holds the lines that begin in it, so that every
    line belongs to one range.

    Args:
        parts: files, or ranges of them.
        report: counts what is read, and what is skipped; a file counts where its first part is read.
        render: words a chat.
        strict: raise at the first line, row or document that would be skipped.

    Raises:
        UsageError: a file that cannot be read or is not what it was, or what `strict` refuses.
    """
    before = 0
    for part in parts:
        report.files += part.start == 0
        path = part.path
        try:
            if path.stat().st_size != part.file_bytes:
                raise UsageError(f"The input {path} has changed since reading began. Run the command again.")
            for text, consumed, complete in _Reader(part, report, render, strict).documents():
                report.documents += complete
                yield Document(_without_surrogates(text), before + consumed, complete)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UsageError(f"The input {path} is damaged ({error}). Leave it out or get it again.") from error
        except OSError as error:
            raise unreadable(path, error) from error
        before += part.bytes


def row_group_bytes(path: Path) -> list[int]:
    """Return the size of each row group of a Parquet file, unpacked, in bytes.

    Raises:
        UsageError: the file cannot be read, or is damaged.
    """
    with _parquet_file(path) as file:
        return [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one part; each method yields documents whose `consumed` counts this part's bytes only."""

    part: Part
    report: ReadReport
    render: Render
    strict: bool

    def documents(self) -> Iterator[Document]:
        """Yield the part's documents."""
        readers = {".parquet": self.parquet, ".jsonl": self.lines}
        return readers.get(input_kind(self.part.path), self.whole_file)()

    def whole_file(self) -> Iterator[Document]:
        """Yield the file as one document, in pieces cut at line ends."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        held, blank = "", True
        with self.part.path.open("rb") as raw, _unpacked(self.part.path, raw) as file:
            block = file.read(_BLOCK_BYTES)
            if b"\0" in block or len(block) - len(block.translate(None, _CONTROLS)) > _MOST_CONTROLS * len(block):
                self._skip("binary_files", "there are zero bytes or control characters, so it is no text in UTF-8")
                return
            while following := file.read(_BLOCK_BYTES) if block else b"":
                held += decoder.decode(block)
                cut = cut_at_line_end(held, len(held))
                blank = blank and not held[:cut].strip()
                yield Document(held[:cut], raw.tell(), False)
                held, block = held[cut:], following
            held += decoder.decode(block, final=True)
            if blank and not held.strip():
                self._skip("empty_documents", "there is no text")
            else:
                yield Document(held, raw.tell())

    def lines(self) -> Iterator[Document]:
        """Yield one document for each line of JSON that begins in the part."""
        part = self.part
        stop = math.inf if part.stop is None else part.stop
        with part.path.open("rb") as raw, _unpacked(part.path, raw) as file:
            at, number = _line_start(file, part.start, stop), 0
            while at < stop and (line := file.readline()):
                number += 1
                place = f"the line at byte {at}" if part.start else f"line {number}"
                text = line.decode("utf-8" if at else "utf-8-sig", "replace")
                at += len(line)
                if not text.strip():
                    continue
                try:
                    row = json.loads(text)
                except (ValueError, RecursionError) as error:
                    self._skip("broken_lines", f"{place} is not JSON ({error})")
                    continue
                yield from self._row(row, min(raw.tell() - part.start, part.bytes), place)

    def parquet(self) -> Iterator[Document]:
        """Yield one document for each row, reading row group by row group."""
        part = self.part
        with _parquet_file(part.path) as file:
            columns = [name for name in ("text", "messages") if name in file.schema_arrow.names]
            if not columns:
                raise UsageError(f"The input {part.path} has no column 'text' or 'messages'. Leave it out.")
            lengths = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            groups = range(len(lengths))[part.start : part.stop]
            before = sum(lengths[: part.start])
            row, rows = 0, sum(lengths[group] for group in groups)
            for group in groups:
                for batch in file.iter_batches(_PARQUET_ROWS, [group], columns):
                    for values in batch.to_pylist():
                        row += 1
                        yield from self._row(values, part.bytes * row // rows, f"row {before + row}")

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
            raise UsageError(f"In {self.part.path}, {why}. Mend it, or read without --strict to skip it.")
        setattr(self.report, counter, getattr(self.report, counter) + 1)


def _unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    """Return the file's content as a stream."""
    return gzip.GzipFile(fileobj=raw) if is_packed(path) else raw  # type: ignore[return-value]  # it reads


def _line_start(file: IO[bytes], start: int, stop: float) -> int:
    """Move `file` to the first line that begins at `start` or behind it, or past `stop`; return where it is then."""
    if not start:
        return 0
    file.seek(start - 1)  # a line begins at `start` if the byte before it ends one
    while file.tell() < stop and (block := file.readline(_BLOCK_BYTES)) and not block.endswith(b"\n"):
        pass
    return file.tell()


@contextlib.contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    """Open a Parquet file, and turn the library's errors into sentences."""
    import pyarrow as pa  # slow to import, and few inputs need it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except pa.ArrowException as error:
        raise UsageError(f"The input {path} is damaged ({error}). Leave it out or get it again.") from error
    except OSError as error:
        raise unreadable(path, error) from error


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


def cut_at_line_end(text: str, limit: int) -> int:
    """Return where to cut `text`, at most at `limit`: behind its last line end, else before its last space."""
    for mark, behind in (("\n", 1), (" ", 0)):
        if (at := text.rfind(mark, 1, limit)) > 0:
            return at + behind
    return limit
