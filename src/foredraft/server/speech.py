"""How the served model marks its thoughts and calls: its dialect, in its own tokens.

Knows the tokenizer. Does not depend on how texts are generated or sent.
"""

from collections.abc import Sequence
from typing import Any

from foredraft.errors import UsageError
from foredraft.server.bodies import TextRequest
from foredraft.server.dialects import Dialect, dialect_of
from foredraft.server.grammars import grammar_of
from foredraft.server.parts import Splitter
from foredraft.text import TextStream, decode

_TAIL = 16  # ids of a prompt in which a thought may begin; a mark has at most eight


class Speech:
    """The dialect of the answers to one prompt, whose ids are given; without marks if it is no conversation.

    A tool, or an earlier call, that the model cannot be told about is a UsageError.
    """

    def __init__(self, tokenizer: Any, prompt: Any, ids: Sequence[int], request: TextRequest) -> None:
        self._tokenizer, self._ids, self._request = tokenizer, ids, request
        self._dialect = dialect_of(template_of(tokenizer)) if _is_conversation(prompt) else Dialect(None, None)
        self._called = bool(request.tools.told)
        added = tokenizer.added_tokens_decoder.items()
        self._specials = {each.content: number for number, each in added if each.special}
        self._added = {each.content: number for number, each in added}
        self._begun = self._thought()

    def splitter(self) -> Splitter:
        """Return what splits an answer."""
        schemas, parallel = self._request.tools.schemas if self._called else None, self._request.tools.parallel
        return Splitter(self._dialect, schemas, thinking=bool(self._begun), parallel=parallel)

    def stream(self) -> tuple[TextStream, frozenset[int]]:
        """Return what decodes an answer, and the ids that are left out: the special tokens that are in no mark."""
        marks = self._dialect.marks(called=self._called)
        shown = {number for text, number in self._specials.items() if any(text in mark for mark in marks)}
        hidden = frozenset(self._specials.values()) - shown if shown else frozenset()
        return TextStream(self._tokenizer, self._ids, special=bool(shown)), hidden

    def grammar(self) -> str | None:
        """Return the grammar of an answer, or None if it may be any text."""
        return grammar_of(
            self._request.shape, self._request.tools, self._dialect, self._specials, self._begun, self._added
        )

    def _thought(self) -> bool | None:
        """Return whether the prompt ends within a thought, or None if it ends behind one or there are none.

        A thought whose mark has no token of its own is one only if the prompt has begun it: a model that is not asked
        to think would take the letters of the mark for a way out of a format.
        """
        thoughts = self._dialect.thoughts
        if thoughts is None:
            return None
        tail = decode(self._tokenizer, self._ids[-_TAIL:], special=True).rstrip()
        if tail.endswith(thoughts.open):
            return True
        is_token = any(thoughts.open.startswith(each) for each in self._added)
        return False if is_token and not tail.endswith(thoughts.close) else None


def template_of(tokenizer: Any) -> str:
    """Return the text of a tokenizer's chat templates."""
    return str(getattr(tokenizer, "chat_template", None))


def check_tools(tokenizer: Any, prompt: Any, *, told: bool) -> None:
    """Raise UsageError if tools, or the calls in a prompt, cannot be told by the tokenizer's chat template."""
    called = _is_conversation(prompt) and any("tool_calls" in each for each in prompt)
    if (told or called) and dialect_of(template_of(tokenizer)).calls is None:
        raise UsageError(
            "This model's chat template does not support tools in a format that this server knows; leave out tools, "
            "and messages with tool_calls."
        )


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and any(isinstance(each, dict) for each in prompt)
