"""The tokenizer that a corpus is built with, as the command line names it: a model's, or a tokenizer.json.

Knows what transformers' tokenizers carry. Does not know what is built.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import UsageError

if TYPE_CHECKING:  # tokenizers are imported when a verb runs, so that help stays quick
    from foredraft.corpus.words import Words


def words_of(model: str | None, tokenizer: Path | None) -> "Words":
    """Return how text becomes ids, from a model's name or a tokenizer's file.

    Args:
        model: `smollm2`, a GGUF file, a hub id, or a folder.
        tokenizer: a tokenizer.json, or a folder that has one.

    Raises:
        UsageError: not exactly one of them is given, or what is given cannot be loaded.
    """
    from foredraft.corpus.words import words_of_file

    if model is not None and tokenizer is None:
        return _words_of_model(model)
    if tokenizer is not None and model is None:
        return words_of_file(tokenizer)
    raise UsageError("Give either --model or --tokenizer, so that the text can be turned into ids.")


def _words_of_model(name: str) -> "Words":
    """Take the tokenizer of a model, as transformers loads it."""
    from foredraft.corpus.words import Words
    from foredraft.model.loading import load_tokenizer

    tokenizer = load_tokenizer(name)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UsageError(
            f"The tokenizer of {name} is not one of the tokenizers library. Give --tokenizer with a tokenizer.json."
        )
    specials = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if not isinstance(value, list)}
    return Words(
        tokenizer.backend_tokenizer.to_str(),
        eos_token_id=tokenizer.eos_token_id,
        chat_template=_template(getattr(tokenizer, "chat_template", None)),
        special_tokens=specials,
        chats="contents",
    )


def _template(known: Any) -> str | None:
    """Return a tokenizer's chat template: the one it has, or of several by name, the default."""
    template = known.get("default") if isinstance(known, dict) else known
    return template if template and isinstance(template, str) else None
