"""How text becomes ids: a tokenizer, the id that ends a document, and how chats are worded.

Knows the `tokenizers` library, Jinja chat templates, and the files that lie beside a tokenizer.json. Does not know
models, or where documents come from. All of it is plain data, so that other processes can be handed it.
"""

import datetime as dt
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from tokenizers import Tokenizer

from foredraft.corpus.documents import Render, join_messages
from foredraft.corpus.fingerprint import tokenizer_hash, vocabulary_size
from foredraft.errors import UsageError

_TODAY = dt.date(2024, 7, 26)
"""The date that chat templates are told, whatever the day: the same text gives the same ids."""
_GENERATION_TAG = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")


@dataclass(frozen=True, slots=True)
class Words:
    """How text becomes ids.

    Attributes:
        tokenizer_json: the tokenizer, as the text of a tokenizer.json.
        eos_token_id: appended to every document that does not end in it; None for none.
        chat_template: the Jinja template that words chats; None for none.
        special_tokens: what the template knows by names such as `bos_token` and `eos_token`.
        chats: without a template, a chat is worded as lines "role: content" (roles), or as what is said (contents).
        tokenizer_hash: which vocabulary the ids belong to.
        vocabulary: a number that every id is below.
        digest: hex, over everything that decides what a text becomes.

    Raises:
        UsageError: `tokenizer_json` is not a tokenizer.
    """

    tokenizer_json: str = field(repr=False)
    eos_token_id: int | None = None
    chat_template: str | None = field(default=None, repr=False)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chats: Literal["roles", "contents"] = "roles"
    tokenizer_hash: str = field(init=False)
    vocabulary: int = field(init=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        tokenizer = self.tokenizer()
        wording = [self.eos_token_id, self.chat_template, dict(self.special_tokens), self.chats, _TODAY.isoformat()]
        described = json.dumps([self.tokenizer_json, wording], sort_keys=True)
        derived = {
            "tokenizer_hash": tokenizer_hash(tokenizer),
            "vocabulary": vocabulary_size(tokenizer),
            "digest": hashlib.sha256(described.encode()).hexdigest(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)  # the way to fill a frozen dataclass

    def tokenizer(self) -> Tokenizer:
        """Return a new tokenizer, which neither pads nor truncates."""
        try:
            tokenizer = Tokenizer.from_str(self.tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise UsageError(f"This is not a tokenizer that the tokenizers library reads ({error}).") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def render(self) -> Render:
        """Return the function that words chats.

        Raises:
            UsageError: the chat template is not a Jinja template.
        """
        if self.chat_template is not None:
            return template_render(self.chat_template, self.special_tokens)
        return join_messages if self.chats == "roles" else join_contents


def join_contents(messages: list[dict[str, str]]) -> str:
    """Word a chat for a model that was made for none: what is said, without who says it."""
    return "\n".join(message["content"] for message in messages)


def template_render(source: str, special_tokens: Mapping[str, str]) -> Render:
    """Return a function that words chats by a Jinja chat template, set up as transformers does.

    Raises:
        UsageError: the source is not a Jinja template.
    """
    import jinja2  # slow to import, and few corpora need it
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": _TODAY.strftime}
    # {% generation %} only marks what the model wrote; a condition that holds leaves the same text.
    plain = _GENERATION_TAG.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", source)
    try:
        template = environment.from_string(plain)
    except jinja2.TemplateError as error:
        raise UsageError(f"The chat template is not a Jinja template ({error}). Mend it, or move it away.") from error

    def render(messages: list[dict[str, str]]) -> str:
        said = [_known(message) for message in messages]
        try:
            return template.render(
                messages=said, tools=None, documents=None, add_generation_prompt=False, **special_tokens
            )
        except Exception as error:  # a template may raise anything about a chat it does not take
            raise UsageError(f"the chat template raised {type(error).__name__}: {error}") from error

    return render


def _known(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message that have a value; a template would write the others as "None"."""
    return {name: value for name, value in message.items() if value is not None}


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """Write a value as JSON; Jinja's own filter of the name escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def words_of_file(path: Path) -> Words:
    """Take tokenizer.json and, where they lie beside it, the end-of-text token and the chat template.

    Args:
        path: a tokenizer.json, or a folder that has one.

    Raises:
        UsageError: there is none, or a file beside it is not what its name says.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"The tokenizer {file} does not exist. Give a tokenizer.json, or a folder that has one.")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise UsageError(f"{file} is not a tokenizer.json that the tokenizers library reads ({error}).") from error
    config_file, template_file = file.with_name("tokenizer_config.json"), file.with_name("chat_template.jinja")
    try:
        config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
    except ValueError as error:
        raise UsageError(f"{config_file} is not JSON ({error}). Mend it, or move it away.") from error
    specials = {name: _token(config.get(name)) for name in ("bos_token", "eos_token")}
    eos = specials["eos_token"]
    return Words(
        tokenizer.to_str(),
        eos_token_id=tokenizer.token_to_id(eos) if eos else None,
        chat_template=template_file.read_text("utf-8") if template_file.is_file() else None,
        special_tokens=specials,
    )


def _token(value: Any) -> str:
    """Return a special token's text, which tokenizer_config.json holds plain or as {"content": ...}."""
    return str((value.get("content") if isinstance(value, dict) else value) or "")
