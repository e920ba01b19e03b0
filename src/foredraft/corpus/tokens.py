"""From documents to token ids: tokenised in batches on all cores, ended, and joined with a separator behind each.

Knows the `tokenizers` library and the separator, which is the vocabulary's size. Does not know where documents come
from, or what becomes of their ids.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from foredraft.corpus.documents import Document, cut_at_line_end
from foredraft.errors import UsageError
from foredraft.index.suffix_array import Symbols, symbol_dtype


class TokenPiece(NamedTuple):
    """Token ids of a document, or of a piece of one: uint32[n], and the document's `consumed` and `complete`."""

    ids: npt.NDArray[np.uint32]
    consumed: int
    complete: bool


class SymbolBlock(NamedTuple):
    """A stretch of documents, one behind the other, each followed by the separator.

    Attributes:
        symbols: ids below V, and V as the separator: uint16[n] where V is at most 65,535, else uint32[n].
        consumed: bytes read of what the block comes from, counted from its beginning.
    """

    symbols: Symbols
    consumed: int


def tokenize_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    batch_characters: int = 4 << 20,
    piece_characters: int = 1 << 20,
) -> Iterator[TokenPiece]:
    """Yield the documents' token ids, without special tokens added, in order.

    A long text is cut at line ends before it is tokenised, so tokens that would span such a cut are not seen as one.
    The `tokenizers` library spreads each batch over the processor's cores.

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


def separated(pieces: Iterable[TokenPiece], vocabulary: int, eos_token_id: int | None = None) -> Iterator[SymbolBlock]:
    """Yield the documents' ids, each document followed by the separator `vocabulary`; documents without ids go.

    Args:
        pieces: from `tokenize_documents`.
        vocabulary: V, which no id reaches.
        eos_token_id: appended to every document that does not end in it; None for none.

    Raises:
        UsageError: an id that is not below the vocabulary.
    """
    dtype = symbol_dtype(vocabulary)
    last, consumed = -1, 0  # the last id of the document in progress, -1 before its first
    for ids, consumed, complete in pieces:
        highest = int(ids.max(initial=0))
        if highest >= vocabulary:
            raise UsageError(
                f"The tokenizer gave the id {highest}, and the vocabulary is {vocabulary}. Give at least {highest + 1}."
            )
        last = int(ids[-1]) if len(ids) else last
        symbols = ids.astype(dtype)
        if complete and last >= 0:
            end = [vocabulary] if eos_token_id is None or last == eos_token_id else [eos_token_id, vocabulary]
            symbols = np.concatenate([symbols, np.array(end, dtype)])
            last = -1
        yield SymbolBlock(symbols, consumed)
    if last >= 0:
        yield SymbolBlock(np.array([vocabulary], dtype), consumed)


def _pieces(text: str, limit: int) -> Iterator[str]:
    start = 0
    while len(text) - start > limit:
        piece = text[start : start + limit]
        cut = cut_at_line_end(piece, limit)
        yield piece[:cut]
        start += cut
    yield text[start:]


def _encoded(batch: list[Document], tokenizer: Tokenizer) -> Iterator[TokenPiece]:
    encodings = tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
    for document, encoding in zip(batch, encodings, strict=True):
        yield TokenPiece(np.array(encoding.ids, np.uint32), document.consumed, document.complete)
