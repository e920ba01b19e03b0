"""The tokens of a GGUF file: their texts and kinds, and which of them have a role, such as ending a turn.

The rules are those of llama.cpp, which also finds roles by a token's text. Does not split texts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from foredraft.errors import UnsupportedModelError
from foredraft.model.gguf.metadata import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Kinds of tokens (`tokenizer.ggml.token_type`); the others, 5 for unused and 6 for a byte, are treated as normal."""

_PREFIX = "tokenizer.ggml."
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "gemma4": {},
}
"""`tokenizer.ggml.model` -> ids of roles that the file need not name."""
_ROLES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("bos", "eos", "unknown", "seperator", "padding", "cls", "mask"), ()),
    "eot": (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
        *("<EOT>", "_<EOT>"),
        *("[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),  # noqa: RUF001  # DeepSeek's own characters
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),  # noqa: RUF001  # the same
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),  # noqa: RUF001  # the same
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),  # noqa: RUF001  # the same
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""The role of `tokenizer.ggml.ROLE_token_id` -> texts by which its token is found when the file does not name it."""
_OLD_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ENDS = (
    *_ROLES["eot"],
    *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[EOS]", "<eos>", "<turn|>"),
    *("<|tool_response>", "[e~["),
)
"""Texts of tokens that end a turn, whatever the file names."""
_CHANNELS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss: part of the answer's text


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file.

    Attributes:
        tokens: the text of each id.
        kinds: of each id.
        ids: the id of each text.
        roles: the id of each role that has one, such as "bos", "eos" or "padding".
        ends: the ids that end a turn, in ascending order.
    """

    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]
    roles: dict[str, int]
    ends: tuple[int, ...]


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Read a file's tokens; UnsupportedModelError if its kind of tokenizer is unknown, or two tokens are the same."""
    model = str(metadata.get(_PREFIX + "model", "none"))
    if model not in _DEFAULT_IDS:
        raise UnsupportedModelError(
            f"This GGUF file has a tokenizer of the kind {model!r} (tokenizer.ggml.model); foredraft reads "
            f"{', '.join(_DEFAULT_IDS)}. Give the model as a transformers folder."
        )
    tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(metadata.get(_PREFIX + "tokens", []))]
    kinds = metadata.get(_PREFIX + "token_type", [NORMAL] * len(tokens))[: len(tokens)]
    ids = {text: index for index, text in enumerate(tokens)}
    if len(ids) < len(tokens) or len(kinds) < len(tokens):
        raise UnsupportedModelError(
            f"This GGUF file lists {len(tokens)} tokens, of which {len(ids)} differ, and {len(kinds)} kinds, so its "
            "tokenizer is damaged; give another file, or the model as a transformers folder."
        )
    roles = _named_ids(metadata, _DEFAULT_IDS[model], len(tokens))
    for role, texts in _ROLES.items():
        found = next((ids[text] for text in texts if text in ids), None)
        if role not in roles and found is not None:
            roles[role], kinds[found] = found, CONTROL
    ends = {roles[role] for role in _ENDING_ROLES if role in roles} | _found(_ENDS, ids)
    for end in _found(_ENDS, ids):
        kinds[end] = CONTROL
    for index in _found(_CHANNELS, ids):
        kinds[index] = USER_DEFINED
    ends -= _inside_turns({tokens[end] for end in ends}, ids, kinds)
    return Vocabulary(tokens, kinds, ids, roles, tuple(sorted(ends)))


def _named_ids(metadata: Metadata, defaults: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the ids that the file gives roles, or their defaults, without those that are no tokens."""
    given = dict(defaults)
    for role in _ROLES:
        for key in (role, _OLD_NAMES.get(role, role)):
            index = metadata.get(f"{_PREFIX}{key}_token_id")
            if index in range(count):
                given[role] = int(index)
    return {role: index for role, index in given.items() if index < count}


def _found(texts: Iterable[str], ids: Mapping[str, int]) -> set[int]:
    return {ids[text] for text in texts if text in ids}


def _inside_turns(ends: set[str], ids: Mapping[str, int], kinds: list[int]) -> set[int]:
    """Return ids of `ends` that do not end a turn beside the others, and correct their kinds."""
    inside = set()
    if "<|end|>" in ends and ends & {"<|call|>", "<|calls|>"} and ends & {"<|return|>", "<|flush|>"}:
        inside.add(ids["<|end|>"])  # gpt-oss, Solar: ends a message, of which a turn has several
        kinds[ids["<|end|>"]] = USER_DEFINED
    if "</s>" in ends and ("<|tool_response>" in ends or "<|plamo:eos|>" in ends):
        inside.add(ids["</s>"])  # Gemma 4: a tag of HTML
        kinds[ids["</s>"]] = NORMAL
    return inside
