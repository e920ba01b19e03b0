"""Documents from text files, JSON lines and Parquet, read piece by piece.

Memory use does not depend on the files' sizes, except for the length of a JSON line. Does not depend on what the
documents are used for, on chat templates, or on any tokenizer.
"""

import codecs
import contextlib
import gzip
import itertools
import json
import math
import os
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from foredraft.errors import ForedraftWarning, UsageError
from foredraft.index.suffix_array import grouped

Render = Callable[[list[dict[str, str]]], str]  # ValueError for a chat that it cannot render
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
_BLOCK_BYTES = 4 << 20  # of a file read at once; also the size of a document's pieces
_PARQUET_ROWS = 256  # rows read at once
_CONTROLS = bytes({*range(1, 32), 127} - set(b"\t\n\v\f\r\x1b"))
_MOST_CONTROLS = 0.02  # share of a text file's bytes; random bytes are one twelfth control characters
_SURROGATES = re.compile("[\ud800-\udfff]")  # lone ones, as JSON may have, which tokenizers reject
_KINDS_NAMED = 3  # in the warning about files of other kinds


@dataclass(frozen=True, slots=True)
class Part:
    """A file to read, or a range of one, as it was when reading was planned."""

    path: Path  # the file
    file_bytes: int  # size of the whole file on disk
    mtime_ns: int  # when the file was last written, in nanoseconds since 1970
    bytes: int  # its share of the file's bytes; a file's parts add up to `file_bytes`
    start: int = 0  # the first byte (.jsonl) or row group (.parquet) of the range; 0 for files of other kinds
    stop: int | None = None  # the byte or row group after the range; None for the end of the file


class Document(NamedTuple):
    """A document, or a piece of a long one; if not `complete`, the next items continue it.

    `consumed` is the number of input bytes, as stored on disk (compressed), read by its end.
    """

    text: str
    consumed: int
    complete: bool = True


@dataclass(slots=True)
class ReadReport:
    """Counts of what was kept and skipped; filled during reading, and summed over parts of a corpus."""

    broken_lines: int = 0  # lines of .jsonl files that are not JSON
    unusable_rows: int = 0  # rows without a usable `text` or `messages`, or whose chat could not be rendered
    empty_documents: int = 0  # documents of white space only
    binary_files: int = 0  # .txt, .md and .py files that are not text
    kept: int = 0  # documents that were tokenised
    tokens: int = 0  # their ids, end-of-text ids included

    def __add__(self, other: "ReadReport") -> "ReadReport":
        return ReadReport(**{name: count + getattr(other, name) for name, count in asdict(self).items()})

    @property
    def left_out(self) -> dict[str, int]:
        names = ("broken_lines", "unusable_rows", "empty_documents", "binary_files")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


def join_messages(messages: list[dict[str, str]]) -> str:
    """Render a chat as lines `role: content`, for use without a chat template."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


def find_inputs(inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files to read: those given, and those of supported kinds in the folders given, at any depth.

    A folder's files come in sorted order, without hidden files and folders, and with a warning about files of other
    kinds. A file that occurs twice is read once. UsageError for an input that is missing, of an unsupported kind, or a
    folder without a supported file.
    """
    found: dict[Path, Path] = {}
    for given in map(Path, inputs):
        if not given.exists():
            raise UsageError(f"The input {given} does not exist. Check its name.")
        if not given.is_dir() and not _kind(given):
            raise UsageError(
                f"The input {given} is of a kind that cannot be read. Give files ending in {', '.join(SUFFIXES)}, "
                "optionally .gz except for .parquet, or folders of them."
            )
        for path in _files_in(given) if given.is_dir() else [given]:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _files_in(folder: Path) -> list[Path]:
    """Return a folder's readable files, and warn about the others."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() or path.is_symlink()]
    paths = [path for path in paths if not any(name.startswith(".") for name in path.relative_to(folder).parts)]
    files = [path for path in paths if path.is_file() and _kind(path)]
    if not files:
        raise UsageError(
            f"The folder {folder} has no file ending in {', '.join(SUFFIXES)} (or those with .gz). Links to folders "
            "are not followed."
        )
    links = "links to folders or to nothing"
    others = Counter(path.suffix or "no ending" if path.is_file() else links for path in sorted({*paths} - {*files}))
    if others:
        named = ", ".join(f"{count} of {kind}" for kind, count in others.most_common(_KINDS_NAMED))
        more = ", ..." if len(others) > _KINDS_NAMED else ""
        warnings.warn(
            f"The folder {folder} has {others.total()} files of other kinds, which are left out: {named}{more}.",
            ForedraftWarning,
            stacklevel=3,
        )
    return files


def _is_packed(path: Path) -> bool:
    return path.name.lower().endswith(".gz")


def _kind(path: Path) -> str:
    """Return the supported suffix of a file, without .gz, or an empty string."""
    name = path.name.lower()
    if not name.endswith(".parquet.gz"):
        name = name.removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def _whole(path: Path) -> Part:
    with _refused(path):
        status = path.stat()
    return Part(path, status.st_size, status.st_mtime_ns, status.st_size)


def parts_of(path: Path, most_bytes: int) -> Iterator[Part]:
    """Cut a file into parts of about `most_bytes` (on disk; .parquet: unpacked); UsageError if it cannot be read.

    A .jsonl file is cut into ranges of bytes and a .parquet file into ranges of row groups; a file of any other kind is
    one part, however large.
    """
    whole, kind = _whole(path), _kind(path)
    size, bounds = whole.file_bytes, [0]
    if kind == ".jsonl" and not _is_packed(path):
        count = max(1, -(-size // most_bytes))
        bounds = [size * i // count for i in range(count + 1)]
    elif kind == ".parquet":
        with _refused(path), _parquet_file(path) as file:
            sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
        bounds += [group[-1] + 1 for group in grouped(range(len(sizes)), sizes.__getitem__, most_bytes)]
    if len(bounds) <= 2:
        yield whole
        return
    for start, stop in itertools.pairwise(bounds):
        share = size * stop // bounds[-1] - size * start // bounds[-1]
        yield Part(path, size, whole.mtime_ns, share, start, stop)


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"The input {path} is damaged ({error}). Leave it out or get it again.") from error
    except OSError as error:
        raise UsageError(f"The input {path} cannot be read ({error.strerror or error}). Leave it out.") from error


def read_documents(
    inputs: Iterable[Path | Part], *, report: ReadReport, render: Render = join_messages, strict: bool = False
) -> Iterator[Document]:
    """Yield the documents of files or parts of files in order; invalid UTF-8 is replaced.

    A .txt, .md or .py file is one document, in pieces of a few MiB; it is skipped if the first piece contains a zero
    byte or many control characters. Each line of .jsonl and row of .parquet is a document, from its field `text` (a
    string) or `messages` (a list of {"role", "content"}), rendered by `render`. A line belongs to the range of a .jsonl
    file in which it begins. `report` counts what is skipped. UsageError if a file cannot be read or has changed, or
    `strict`, and something would be skipped.
    """
    before = 0
    for part in (each if isinstance(each, Part) else _whole(each) for each in inputs):
        with _refused(part.path):
            if part.path.stat().st_size != part.file_bytes:
                raise UsageError(f"The input {part.path} has changed since reading began. Run the command again.")
            reader = _Reader(part, report, render, strict)
            readers = {".parquet": reader.parquet, ".jsonl": reader.lines}
            for document in readers.get(_kind(part.path), reader.whole_file)():
                yield document._replace(consumed=before + document.consumed)
        before += part.bytes


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one part; `consumed` counts the bytes of this part only."""

    part: Part
    report: ReadReport
    render: Render
    strict: bool

    def whole_file(self) -> Iterator[Document]:
        """Yield the file as one document, in pieces cut at line ends."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        held, is_cut = "", False
        with self.part.path.open("rb") as raw, _unpacked(self.part.path, raw) as file:
            block = file.read(_BLOCK_BYTES)
            if b"\0" in block or len(block) - len(block.translate(None, _CONTROLS)) > _MOST_CONTROLS * len(block):
                self._skip("binary_files", "there are zero bytes or control characters, so it is not UTF-8 text")
                return
            while following := file.read(_BLOCK_BYTES):
                held += decoder.decode(block)
                cut = cut_at_line_end(held, len(held))
                yield Document(held[:cut], raw.tell(), False)
                held, block, is_cut = held[cut:], following, True
            held += decoder.decode(block, final=True)
            if is_cut or held.strip():
                yield Document(held, raw.tell())
            else:
                self._skip("empty_documents", "there is no text")

    def lines(self) -> Iterator[Document]:
        """Yield one document for each line of JSON that begins in the part."""
        part = self.part
        stop = math.inf if part.stop is None else part.stop
        with part.path.open("rb") as raw, _unpacked(part.path, raw) as file:
            if part.start:
                file.seek(part.start - 1)  # a line begins at `start` if the byte before it ends one
                file.readline(part.bytes + 1)  # no further than the part's end: the line may be longer
            at, number = file.tell(), 0
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
        """Yield one document for each row, one row group at a time."""
        part = self.part
        with _parquet_file(part.path) as file:
            columns = [name for name in ("text", "messages") if name in file.schema_arrow.names]
            if not columns:
                raise UsageError(f"The input {part.path} has no column 'text' or 'messages'. Leave it out.")
            lengths = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            groups = range(len(lengths))[part.start : part.stop]
            before, rows = sum(lengths[: part.start]), sum(lengths[group] for group in groups)
            batches = file.iter_batches(_PARQUET_ROWS, list(groups), columns) if groups else ()
            for row, values in enumerate((values for batch in batches for values in batch.to_pylist()), 1):
                yield from self._row(values, part.bytes * row // rows, f"row {before + row}")

    def _row(self, row: Any, consumed: int, place: str) -> Iterator[Document]:
        row = row if isinstance(row, dict) else {}
        text = row.get("text")
        if not isinstance(text, str):
            if not _is_chat(row.get("messages")):
                self._skip("unusable_rows", f"{place} has no usable field 'text' or 'messages'")
                return
            try:
                text = self.render(row["messages"])
            except ValueError as error:
                self._skip("unusable_rows", f"the chat of {place} cannot be rendered ({error})")
                return
        if text.strip():
            yield Document(_SURROGATES.sub("\ufffd", text), consumed)
        else:
            self._skip("empty_documents", f"{place} has no text")

    def _skip(self, counter: str, why: str) -> None:
        if self.strict:
            raise UsageError(f"In {self.part.path}, {why}. Fix it, or read without --strict to skip it.")
        setattr(self.report, counter, getattr(self.report, counter) + 1)


def _unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    return gzip.GzipFile(fileobj=raw) if _is_packed(path) else raw  # type: ignore[return-value]  # a GzipFile is not declared IO, but reads alike


@contextlib.contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    import pyarrow as pa  # slow to import, and few inputs need it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise UsageError(f"The input {path} is damaged ({error}). Leave it out or get it again.") from error


def _is_chat(messages: Any) -> bool:
    listed = isinstance(messages, list) and bool(messages) and all(isinstance(each, dict) for each in messages)
    return listed and all(isinstance(each.get(name), str) for each in messages for name in ("role", "content"))


def cut_at_line_end(text: str, limit: int) -> int:
    """Return where to cut `text`, at most at `limit`: after the last line end, else before the last space."""
    for mark, after in (("\n", 1), (" ", 0)):
        if (at := text.rfind(mark, 1, limit)) > 0:
            return at + after
    return limit
