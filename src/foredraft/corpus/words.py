"""How text becomes ids: a tokenizer identified by a hash, the end-of-document id, and the rendering of chats.

Uses the `tokenizers` library and Jinja chat templates. Everything is plain data, so that it can be sent to other
processes. Does not depend on models, or on where documents come from.
"""

import datetime as dt
import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any, NoReturn

import numpy as np
from tokenizers import Tokenizer

from foredraft.corpus.documents import Document, ReadReport, Render, cut_at_line_end, join_messages
from foredraft.errors import UsageError
from foredraft.index.suffix_array import Symbols, grouped, symbol_dtype

_TODAY = dt.date(2024, 7, 26)  # what chat templates see, so that the same text gives the same ids on any day
_GENERATION_TAG = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return the SHA-256, in hex, of all (id, token) pairs in ascending order, added tokens included.

    Each pair is hashed as the id (uint32), the token's number of bytes (uint32), both little-endian, and the token in
    UTF-8.
    """
    digest = hashlib.sha256()
    for number, token in sorted((number, token) for token, number in tokenizer.get_vocab(True).items()):
        data = token.encode()
        digest.update(struct.pack("<II", number, len(data)) + data)
    return digest.hexdigest()


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return a number above every id of the tokenizer; ids may have gaps."""
    return max(tokenizer.get_vocab(True).values(), default=-1) + 1


@dataclass(frozen=True)
class Words:
    """How text becomes ids. Without a chat template, chats become lines `role: content`."""

    tokenizer_json: str = field(repr=False)  # the tokenizer, as the text of a tokenizer.json
    eos_token_id: int | None = None  # appended to every document that does not end in it; None for none
    chat_template: str | None = field(default=None, repr=False)  # in Jinja
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # template variables such as `eos_token`
    least_vocabulary: int = 0  # of a model that has more ids than the tokenizer

    @cached_property
    def tokenizer_hash(self) -> str:
        return tokenizer_hash(self.tokenizer())

    @cached_property
    def vocabulary(self) -> int:
        return max(vocabulary_size(self.tokenizer()), self.least_vocabulary)

    @cached_property
    def digest(self) -> str:
        """A hash, in hex, of everything that determines a text's ids."""
        described = json.dumps([asdict(self), _TODAY.isoformat()], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()

    def tokenizer(self) -> Tokenizer:
        """Return a new tokenizer that neither pads nor truncates."""
        tokenizer: Tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def render(self) -> Render:
        """Return the function that renders chats; raises as `template_render`."""
        return join_messages if self.chat_template is None else template_render(self.chat_template, self.special_tokens)


def template_render(source: str, special_tokens: Mapping[str, str]) -> Render:
    """Return a function that renders chats with a Jinja template as transformers does; UsageError if it is not one."""
    import jinja2  # slow to import, and few corpora need it
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own escapes for HTML
    environment.globals |= {"raise_exception": refuse, "strftime_now": _TODAY.strftime}
    # {% generation %} only marks what the model wrote; replaced by a condition that always holds
    plain = _GENERATION_TAG.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source)
    try:
        template = environment.from_string(plain)
    except jinja2.TemplateError as error:
        raise UsageError(f"The chat template is not a Jinja template ({error}). Fix it, or move it away.") from error

    def render(messages: list[dict[str, str]]) -> str:
        chat: Sequence[Mapping[str, Any]] = messages
        valued = [{name: value for name, value in message.items() if value is not None} for message in chat]
        absent = {"tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return template.render(messages=valued, **absent, **special_tokens)
        except Exception as error:  # a template may raise anything for a chat that it rejects
            raise UsageError(f"the chat template raised {type(error).__name__}: {error}") from error

    return render


def tokenize(
    documents: Iterable[Document], tokenizer: Tokenizer, vocabulary: int, eos_token_id: int | None = None, *,
    report: ReadReport | None = None, batch_characters: int = 4 << 20, piece_characters: int = 1 << 20,
) -> Iterator[Symbols]:  # fmt: skip
    """Yield the documents' ids in order, each document followed by the separator V; documents without ids are dropped.

    A batch of ids is uint16[n] if V, `vocabulary`, at least `vocabulary_size(tokenizer)`, is at most 65,535, else
    uint32[n]. `eos_token_id` is appended to every document that does not end in it. `report` counts what is yielded.

    A text is cut at line ends into pieces of at most `piece_characters` before tokenisation, so a token never spans
    such a cut. The `tokenizers` library distributes each batch, of pieces of about `batch_characters` together, over
    the processor's cores. Padding, truncation and special tokens of the tokenizer are ignored.
    """
    if tokenizer.padding is not None or tokenizer.truncation is not None:
        tokenizer = Words(tokenizer.to_str()).tokenizer()
    report, dtype = report or ReadReport(), symbol_dtype(vocabulary)
    last = -1  # last id of the current document, -1 before its first
    for batch in grouped(_pieces(documents, piece_characters), lambda piece: len(piece.text), batch_characters):
        encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
        symbols: list[int] = []
        for piece, encoding in zip(batch, encodings, strict=True):
            ids: list[int] = encoding.ids
            symbols += ids
            last = ids[-1] if ids else last
            if piece.complete and last >= 0:
                symbols += [vocabulary] if eos_token_id is None or last == eos_token_id else [eos_token_id, vocabulary]
                report.kept, last = report.kept + 1, -1
        report.tokens += len(symbols) - symbols.count(vocabulary)
        yield np.array(symbols, dtype)


def _pieces(documents: Iterable[Document], most: int) -> Iterator[Document]:
    """Cut documents into pieces of at most `most` characters."""
    for document in documents:
        text, start = document.text, 0
        while len(text) - start > most:
            stop = start + cut_at_line_end(text[start : start + most], most)
            yield document._replace(text=text[start:stop], complete=False)
            start = stop
        yield document._replace(text=text[start:])
