"""The grammar of an answer: a thought, and then what its format or its tools allow; in llguidance's notation.

Does not know a model's tokens, but for the ids of its special ones.
"""

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from foredraft.errors import UsageError
from foredraft.server.bodies import Shape, Tools
from foredraft.server.dialects import Calls, Dialect
from foredraft.server.notation import WHITE, Notation

_LONGEST = 1 << 17  # characters of a schema or a regular expression, and of all tools' (chosen)
_WHITE = r"/[ \t\n]{0,4}/"  # between a thought and what follows it; models write two line breaks


def grammar_of(
    shape: Shape | None, tools: Tools, dialect: Dialect, specials: Mapping[str, int], thought: bool | None,
    added: Mapping[str, int],
) -> str | None:  # fmt: skip
    """Return the grammar of an answer, or None if it may be any text.

    `thought` says whether a thought has begun; None that there is none. `specials` are the ids of special tokens, and
    `added` those of all tokens that are whole marks. What is too long, or would be enforced in part, is a UsageError.
    """
    to, calls = Notation(specials), dialect.calls if tools.bound else None
    if shape is None and calls is None:
        return None
    if (size := len(json.dumps([shape, tools.schemas if calls else None]))) > _LONGEST:
        raise UsageError(f"The response format has {size:,} characters, of at most {_LONGEST:,}; use a simpler one.")
    head, answer = _thought(dialect, to, thought, Notation(added))
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


def _thought(dialect: Dialect, to: Notation, begun: bool | None, marks: Notation) -> tuple[str, str]:
    """Return the expressions of a thought and of what precedes an answer."""
    thoughts = dialect.thoughts
    if thoughts is None or begun is None:
        return "", to.text(thoughts.answer) if thoughts else ""
    rest = f"{to.until(thoughts.close)} {_WHITE} {to.text(thoughts.turn)}"
    head = rest if begun else f"({marks.text(thoughts.open)} {rest})?"
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
