"""How the served model marks its thoughts and calls, in its own tokens, and the grammar of an answer.

A grammar is a thought, and then what the format or the tools allow, in llguidance's notation. Knows the tokenizer. Does
not depend on how texts are generated or sent.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from foredraft.contracts import TokenIds
from foredraft.errors import UsageError
from foredraft.server.bodies import Shape, TextRequest, Tools
from foredraft.server.calls import JsonCall, PythonCall
from foredraft.server.dialects import GPT_OSS, Calls, Dialect, dialect_of
from foredraft.server.notation import WHITE, Notation
from foredraft.server.parts import Splitter
from foredraft.text import TextStream, decode

_TAIL = 16  # ids of a prompt in which a thought may begin; a mark has at most eight
_LONGEST = 1 << 17  # characters of a schema or a regular expression, and of all tools' (chosen)
_WHITE = r"/[ \t\n]{0,4}/"  # between a thought and what follows it; models write two line breaks


class Speech:
    """The dialect of the answers to one prompt, whose `ids` are given; without marks if it is no conversation.

    `grammar` is that of an answer, or None if it may be any text. UsageError for a format that is not supported.
    """

    def __init__(self, tokenizer: Any, prompt: Any, ids: TokenIds, request: TextRequest) -> None:
        self.ids, self._tokenizer, self._request = ids, tokenizer, request
        self._dialect = dialect_of(template_of(tokenizer)) if _is_conversation(prompt) else Dialect(None, None)
        self._called = bool(request.tools.told)
        added = tokenizer.added_tokens_decoder.items()
        self._specials = {each.content: number for number, each in added if each.special}
        self._added = {each.content: number for number, each in added}
        marks = self._dialect.marks(called=self._called)
        self._shown = frozenset(
            number for text, number in self._specials.items() if any(text in mark for mark in marks)
        )
        self._begun = self._thought()
        # to llguidance, all added tokens in angle brackets are special, as Qwen's <tool_call>: no letters match them
        tokens = {
            text: number for text, number in self._added.items()
            if text in self._specials or (text.startswith("<") and text.endswith(">"))
        }  # fmt: skip
        self.grammar = grammar_of(request.shape, request.tools, self._dialect, tokens, self._begun)

    def splitter(self) -> Splitter:
        """Return what splits an answer."""
        schemas, parallel = self._request.tools.schemas if self._called else None, self._request.tools.parallel
        return Splitter(self._dialect, schemas, thinking=bool(self._begun), parallel=parallel)

    def stream(self) -> tuple[TextStream, frozenset[int]]:
        """Return what decodes an answer, and the ids that are left out: the special tokens that are in no mark."""
        hidden = frozenset(self._specials.values()) - self._shown if self._shown else frozenset()
        return TextStream(self._tokenizer, self.ids.tolist(), special=bool(self._shown)), hidden

    def unsearched(self, stops: Sequence[str]) -> frozenset[int]:
        """Return the ids in whose text stop strings are not looked for, as `StopStrings` does not: those of marks."""
        held = any(special in stop for special in self._specials for stop in stops)
        return frozenset() if held else self._shown

    def _thought(self) -> bool | None:
        """Return whether the prompt ends within a thought, or None if it ends behind one or there are none.

        A thought whose mark has no token of its own is one only if the prompt has begun it: a model that is not asked
        to think would take the letters of the mark for a way out of a format.
        """
        thoughts = self._dialect.thoughts
        if thoughts is None:
            return None
        tail = decode(self._tokenizer, self.ids[-_TAIL:].tolist(), special=True).rstrip()
        if tail.endswith(thoughts.open):
            return True
        is_token = any(thoughts.open.startswith(each) for each in self._added)
        return False if is_token and not tail.endswith(thoughts.close) else None


def template_of(tokenizer: Any) -> str:
    """Return the text of a tokenizer's chat templates."""
    return str(getattr(tokenizer, "chat_template", None))


def for_template(tokenizer: Any, prompt: Any, *, told: bool = False) -> Any:
    """Return a prompt as the tokenizer's chat template takes it; UsageError for calls, or `told` tools, that it cannot.

    gpt-oss's refuses a thought beside a text in a message with a call, and writes either one as a thought: so the text
    becomes the end of the thought. Those of LFM 2 and Granite 3 write no calls, which are part of the text there.
    """
    if not _is_conversation(prompt):
        return prompt
    template = template_of(tokenizer)
    dialect = dialect_of(template)
    if dialect.calls is None and (told or any("tool_calls" in each for each in prompt)):
        raise UsageError(
            "This model's chat template does not support tools in a format that this server knows; leave out tools, "
            "and messages with tool_calls."
        )
    if dialect.thoughts == GPT_OSS:
        return [
            {**each, "thinking": f"{each['thinking']}\n\n{each['content']}", "content": ""}
            if {"thinking", "tool_calls"} <= each.keys() and each["content"] else each
            for each in prompt
        ]  # fmt: skip
    if dialect.calls is not None and "tool_calls" not in template:
        return [
            {**each, "content": each["content"] + _written(dialect.calls, each["tool_calls"])}
            if "tool_calls" in each else each
            for each in prompt
        ]  # fmt: skip
    return prompt


def _written(calls: Calls, given: Sequence[Mapping[str, Any]]) -> str:
    """Return the calls of a message as the model wrote them, in JSON or Python's notation."""
    style = calls.style
    if not isinstance(style, JsonCall | PythonCall):
        return ""
    written = [style.write(**each["function"]) + calls.end for each in given]
    return calls.prefix + (calls.between or calls.prefix).join(written) + calls.suffix


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and any(isinstance(each, dict) for each in prompt)


def grammar_of(
    shape: Shape | None, tools: Tools, dialect: Dialect, specials: Mapping[str, int], thought: bool | None
) -> str | None:
    """Return the grammar of an answer, or None if it may be any text.

    `thought` says whether a thought has begun; None that there is none. `specials` are the ids of special tokens. What
    is too long, or would be enforced in part, is a UsageError.
    """
    to, calls = Notation(specials), dialect.calls if tools.bound else None
    if shape is None and calls is None:
        return None
    if (size := len(json.dumps([shape, tools.schemas if calls else None]))) > _LONGEST:
        raise UsageError(f"The response format has {size:,} characters, of at most {_LONGEST:,}; use a simpler one.")
    head, answer = _thought(dialect, to, thought)
    said = f"{answer} @shape".strip() if shape is not None else ""
    if calls is not None:
        listed = _calls(calls, tools, to)
        said = listed if tools.required else f"{said} | {listed}" if said else _maybe(calls, listed, to)
    grammars: list[dict[str, Any]] = [{"lark_grammar": "\n".join([f"start: {head} ({said})", *to.rules])}]
    if shape is not None:
        regex, schema = LLMatcher.grammar_from_regex, LLMatcher.grammar_from_json_schema
        written = regex(shape) if isinstance(shape, str) else schema({"x-guidance": WHITE, **shape})
        grammars += [each | {"name": "shape"} for each in json.loads(written)["grammars"]]
    return json.dumps({"grammars": grammars})


def _thought(dialect: Dialect, to: Notation, begun: bool | None) -> tuple[str, str]:
    """Return the expressions of a thought and of what precedes an answer."""
    thoughts = dialect.thoughts
    if thoughts is None or begun is None:
        return "", to.text(thoughts.answer) if thoughts else ""
    rest = f"{to.until(thoughts.close)} {_WHITE} {to.text(thoughts.turn)}"
    head = rest if begun else f"({to.text(thoughts.open)} {rest})?"
    return head, to.text(thoughts.answer) and f"({to.text(thoughts.answer)})?"


def _calls(calls: Calls, tools: Tools, to: Notation) -> str:
    """Return the expression of the calls of an answer, at least one."""
    for number, (name, schema) in enumerate(tools.schemas.items()):
        to.rules.append(f"call-{number}: {calls.style.rule(name, schema, to)} {to.text(calls.end)}")
    to.rules.append(f"call: {' | '.join(f'call-{number}' for number in range(len(tools.schemas)))}")
    more = f"({to.text(calls.between)} call)*" if tools.parallel and calls.between is not None else ""
    return f"{to.text(calls.prefix)} call {more} {to.text(calls.suffix)}"


def _maybe(calls: Calls, listed: str, to: Notation) -> str:
    """Return the expression of any text in which calls, from their mark on, are as they have to be."""
    if calls.bare:
        return rf"/([^\s{calls.bare}](.|\n)*)?/ | {listed}"
    mark = next(each for each in (*calls.dropped, *calls.opens) if calls.prefix.startswith(each))
    rest = listed.removeprefix(to.text(calls.prefix))
    return f"({to.until(mark)} {to.text(calls.prefix.removeprefix(mark))} {rest})* TEXT"
