"""Checks (model, tokenizer) pairs, and loads a draft model for a target; both must have the same tokens.

Does not depend on what is drafted, or how.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from foredraft.errors import ForedraftWarning, UsageError
from foredraft.model.head_files import CONFIG_FILE
from foredraft.model.heads import load_draft_model
from foredraft.model.loading import load_tokenizer
from foredraft.model.named_target import load_target
from foredraft.model.target import TorchTarget
from foredraft.model.text_part import text_model, text_tokenizer
from foredraft.options import user_path

_SHOWN = 3  # differing ids in a message (chosen)


def pair_draft_model(model: Any, target: TorchTarget, tokenizer: Any) -> TorchTarget:
    """Return the draft model for a target with its `tokenizer`; one loaded by name gets its dtype and device.

    `model` is a hub id, a folder, a GGUF file, a folder from `foredraft train draft`, or a pair (transformers model,
    tokenizer). UsageError for a model that cannot be loaded, or vocabularies that differ in an id that both have;
    UnsupportedModelError for a model whose passes cannot verify a tree.
    """
    if isinstance(model, str | Path) and ((folder := user_path(model)) / CONFIG_FILE).is_file():
        return target.with_model(load_draft_model(folder, target.model)[1], rounded=True)
    if tokenizer is None:
        raise UsageError(
            "The target's tokenizer is not known, so that of a draft model cannot be compared with it; load the target "
            "from a folder that has one, or give it as the option tokenizer."
        )
    if isinstance(model, str | Path):
        model = str(model)
        draft_tokenizer = load_tokenizer(model)
        _check_vocabularies(tokenizer, draft_tokenizer, model)  # before the weights are read
        draft = load_target(model, target.dtype, str(target.device), compiled=target.compiled is not None)
    else:
        transformer, draft_tokenizer = given_pair(model)
        _check_vocabularies(tokenizer, draft_tokenizer, type(transformer).__name__)
        draft = TorchTarget(transformer)
    if draft.parameters >= target.parameters:
        warnings.warn(
            f"The draft model has {draft.parameters / 1e6:,.0f} million parameters and the target "
            f"{target.parameters / 1e6:,.0f} "
            "million, so drafting probably costs more than it saves. Swap them, or use a smaller draft model.",
            ForedraftWarning,
            stacklevel=2,
        )
    return draft


def given_pair(model: Any) -> tuple[Any, Any]:
    """Return a pair (transformers model, tokenizer), the model in evaluation mode; UsageError for another type.

    Of a model with a vision or audio part and its processor, these are the text model and the tokenizer.
    """
    try:
        transformer, tokenizer = model
    except (TypeError, ValueError) as error:
        raise UsageError("Give a model as a name, a folder, or a pair (transformers model, tokenizer).") from error
    if not isinstance(transformer, torch.nn.Module) or isinstance(tokenizer, torch.nn.Module | Tokenizer | None):
        kinds = f"({type(transformer).__name__}, {type(tokenizer).__name__})"
        raise UsageError(f"The pair is {kinds}; give (transformers model, transformers tokenizer), the model first.")
    return text_model(transformer.eval()), text_tokenizer(tokenizer)


def _check_vocabularies(ours: Any, theirs: Any, name: str) -> None:
    """Raise UsageError if an id has different tokens in the two tokenizers, or if no id is in both."""
    # conversions to GGUF write spaces in some tokens of SentencePiece's as they are
    tokens, vocabulary = (
        {number: token.replace("\u2581", " ") for token, number in each.get_vocab().items()} for each in (ours, theirs)
    )
    other = [(n, tokens[n], token) for n, token in vocabulary.items() if tokens.get(n, token) != token]
    if other or not tokens.keys() & vocabulary.keys():
        examples = "; ".join(f"id {n} is {a!r} and {b!r}" for n, a, b in sorted(other)[:_SHOWN])
        raise UsageError(
            f"The draft model {name} has another tokenizer than the target ({len(other)} ids differ: {examples}). Give "
            "one of the target's family, with the same tokenizer."
        )
