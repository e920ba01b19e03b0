"""How models write tool calls: five styles, each of which reads a call as it is written, and says what it may be.

`read` takes the text behind the mark of a call, from the beginning at each time, so that the pieces in which the text
comes do not matter, and returns what is known of the call, or None if it is none; `last` is as in `first_mark`. `rule`
returns the expression for a call of a tool whose arguments have a schema; one with a keyword that would not be enforced
is a UsageError. `write` returns a call as it is written, in the styles in which templates write none. Does not know
which model writes in which style.
"""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from foredraft.errors import UsageError
from foredraft.options import shown
from foredraft.server.notation import Notation, first_mark

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by the name of the tool

_LONGEST_HEAD = 400  # characters of a call before its arguments; what is longer is no call (chosen)
_NESTED = {
    "json": re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL),
    "python": re.compile(r"""\"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|'(?:[^'\\]++|\\.)*+(?:'|\\?\Z)|[()\[\]{}]""", re.DOTALL),
}


class Reading(NamedTuple):
    """What is known of a call: its name, "" at first; its arguments, JSON so far; its end, -1 while it goes on."""

    name: str = ""
    arguments: str = ""
    end: int = -1


@dataclass(frozen=True, slots=True)
class JsonCall:
    """An object of a name and arguments: `{"name": "f", "arguments": {"a": 1}}`."""

    name: str = "name"
    arguments: str = "arguments"
    listed: bool = False  # whether a bracket may precede the object
    bare: bool = False  # whether nothing marks the object but its first key

    def read(self, text: str, schemas: Schemas, *, last: bool) -> Reading | None:  # noqa: ARG002, PLR0911  # a style's signature; each way out is one fact
        at = len(text) - len(text.lstrip(" \n\t\r[" if self.listed else None))
        if at == len(text):
            return None if last else Reading()
        if text[at] != "{" or (self.bare and not _may_be_call(text[at:])):
            return None
        if head := _HEAD.match(text, at):
            name, place = head["name"], head.end()
            if place < len(text) and text[place] == "{":
                stop = _value_end(text, place)
                end = None if stop is None else _value_end(text, at)
                return Reading(name, text[place:stop], len(text) if last and end is None else end or -1)
            if place == len(text):
                return Reading(name, "", place) if last else Reading()
        end = _value_end(text, at)
        if end is None:
            return None if last else Reading()
        try:
            found = read_json(text[at:end])
            name = found.get("name", found.get("tool_name"))
            given = found.get("arguments") or found.get("parameters") or {}
            given = read_json(given) if isinstance(given, str) else given
        except (ValueError, RecursionError):
            return None
        is_call = isinstance(name, str) and isinstance(given, dict)
        return Reading(name, json.dumps(given), end) if is_call else None

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({self.name: name, self.arguments: arguments}, ensure_ascii=False)

    def rule(self, name: str, schema: Mapping[str, Any], to: Notation) -> str:
        head = f'{{"{self.name}": {json.dumps(name)}, "{self.arguments}": '
        return f'{to.text(head)} {to.json(schema)} "}}"'


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A name, matched by `head`, and an object of arguments: `f[ARGS]{"a": 1}`; `written` is the head to write."""

    head: str
    written: str

    def read(self, text: str, schemas: Schemas, *, last: bool) -> Reading | None:  # noqa: ARG002  # a style's signature
        head = re.match(self.head, text)
        if head is None:
            return None if last or len(text) > _LONGEST_HEAD else Reading()
        if head.end() == len(text):
            return Reading(head["name"], "", len(text)) if last else Reading()
        if text[head.end()] != "{":
            return None
        stop = _value_end(text, head.end())
        return Reading(head["name"], text[head.end() : stop], len(text) if last and stop is None else stop or -1)

    def rule(self, name: str, schema: Mapping[str, Any], to: Notation) -> str:
        return f"{to.text(self.written.format(name))} {to.json(schema)}"


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """A name, and arguments between tags: `f><parameter=a>1</parameter></function>`.

    `name` ends the name (its line break may be missing), `key` matches what precedes a value, and `written` is it with
    `{0}` for the argument's name, and `{1}` for whether it is a string; `close` follows a value, `end` the last one.
    Values that the schema calls strings are as they are written, without the line breaks of `written` and `close`;
    others are JSON.
    """

    name: str
    key: str
    written: str
    close: str
    end: str

    def read(self, text: str, schemas: Schemas, *, last: bool) -> Reading | None:
        begin = len(text) - len(text.lstrip())
        place, mark = first_mark(text[begin:], [self.name.rstrip("\n") or self.name, "<"], last=last)
        name = text[begin : begin + place]
        if mark is None:
            return None if last or len(text) > _LONGEST_HEAD else Reading()
        if not name or len(name.split()) > 1:
            return None
        at, key = begin + place + (0 if mark == "<" else len(mark)), re.compile(self.key)
        properties, written = schemas.get(name, {}).get("properties", {}), list[str]()
        before, after = "\n" * self.written.endswith("\n"), "\n" * self.close.startswith("\n")
        while found := key.match(text, at):
            given, begun = properties.get(found[1], {}), f"{json.dumps(found[1])}: "
            length, close = first_mark(text[found.end() :], [self.close.strip(), self.close], last=last)
            value = text[found.end() :][:length].removeprefix(before)
            if close is None:  # it goes on
                if _types(given) == {"string"}:
                    written.append(begun + json.dumps(value)[:-1])
                return Reading(name, "{" + ", ".join(written), len(text) if last else -1)
            value = value if close.startswith("\n") else value.removesuffix(after)
            written.append(begun + json.dumps(_typed(value, given)))
            at = found.end() + length + len(close)
        rest, opening = text[at:].lstrip(), self.written.partition("{0}")[0]
        is_key = opening.startswith(rest) or (rest.startswith(opening) and len(rest) < _LONGEST_HEAD)
        if not last and (self.end.startswith(rest) or is_key):
            return Reading(name, "{" + ", ".join(written))
        end = len(text) - len(rest) + len(self.end) if rest.startswith(self.end) else at
        return Reading(name, "{" + ", ".join(written) + "}", end)

    def rule(self, name: str, schema: Mapping[str, Any], to: Notation) -> str:
        _check(schema, *_OBJECT)
        parts = [to.text(name + self.name)]
        for key, given in schema.get("properties", {}).items():
            given = _usual(given)  # noqa: PLW2901  # the same, said otherwise
            if is_text := _types(given) == {"string"}:
                _check(given, "type", "enum")
            begun, closed = to.text(self.written.format(key, str(is_text).lower())), to.text(self.close)
            if is_text and "enum" in given:
                choices = [to.text(each) for each in given["enum"] if isinstance(each, str)]
                value = f"({' | '.join(choices)}) {closed}"
            else:
                value = to.until(self.close) if is_text else f"{to.json(given, schema)} {closed}"
            parts.append(f"({begun} {value})" + ("" if key in schema.get("required", ()) else "?"))
        return " ".join([*parts, to.text(self.end)])


@dataclass(frozen=True, slots=True)
class PythonCall:
    """A call in Python's notation: `f(a=1, b="x")`; JSON's true, false and null are taken too."""

    bare: bool = False  # whether nothing marks the call but a bracket and the name of a tool

    def read(self, text: str, schemas: Schemas, *, last: bool) -> Reading | None:
        at = len(text) - len(text.lstrip(" \n\t\r["))
        name, bracket, _ = text[at:].partition("(")
        if not all(part.isidentifier() for part in name.split(".")) or (self.bare and bracket and name not in schemas):
            return None if name or last else Reading()
        stop = _value_end(text, at + len(name), "python") if bracket else None
        if stop is None:
            return None if last else Reading()
        try:
            call = ast.parse(_NESTED["python"].sub(_without_breaks, text[at:stop]), mode="eval").body
            if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
                return None
            given = json.dumps({each.arg: _python_value(each.value) for each in call.keywords}, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # what Python's parser raises
            return None
        return Reading(name, given, stop)

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    def rule(self, name: str, schema: Mapping[str, Any], to: Notation) -> str:
        _check(schema, *_OBJECT)
        given = schema.get("properties", {}).items()
        values = {key: f"{to.text(key + '=')} {to.json(each, schema)}" for key, each in given}
        return f'{to.text(name + "(")} {to.separated(values, schema.get("required", ()), ", ")} ")"'


@dataclass(frozen=True, slots=True)
class BraceCall:
    """Gemma's notation, `call:f{a:<|"|>text<|"|>,b:[1]}`: JSON with bare keys, and another `quote`."""

    quote: str

    def read(self, text: str, schemas: Schemas, *, last: bool) -> Reading | None:  # noqa: ARG002  # a style's signature
        head = re.match(r"\s*call:\s*(?P<name>[\w.-]+)\s*(?=\{)", text)
        if head is None:
            return None if last or len(text) > _LONGEST_HEAD else Reading()
        quote, written, depth, at = re.escape(self.quote), "", 0, head.end()
        token = re.compile(rf"\s*(?:{quote}(?P<text>.*?){quote}(?P<key>\s*:)?|(?P<sign>[{{}}\[\],])|"
                           rf"(?P<bare>[^{{}}\[\],:<]+)(?P<colon>:|(?=[,\]}}])))", re.DOTALL)  # fmt: skip
        while found := token.match(text, at):
            at = found.end()
            if found["sign"]:
                depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found["sign"], 0)
                written += ", " if found["sign"] == "," else found["sign"]
                if not depth:
                    return Reading(head["name"], written, at)
            elif found["text"] is not None or found["colon"]:
                written += json.dumps(found["bare"].strip() if found["colon"] else found["text"])
                written += ": " if found["colon"] or found["key"] else ""
            else:
                written += json.dumps(_typed(found["bare"].strip(), {}))
        rest = text[at:].lstrip()
        goes_on = self.quote.startswith(rest) or rest.startswith(self.quote) or re.fullmatch(r"[^{}\[\],:<]*", rest)
        end = at if not goes_on else len(text) if last else -1  # what no token begins with follows the call
        return Reading(head["name"], written, end)

    def rule(self, name: str, schema: Mapping[str, Any], to: Notation) -> str:
        return f"{to.text('call:' + name)} {self._value({'type': 'object'} | dict(schema), to)}"

    def _value(self, given: Mapping[str, Any], to: Notation) -> str:
        given = _usual(given)
        kinds = _types(given)
        if kinds and not kinds & {"string", "object", "array"}:
            return to.json(given)
        if isinstance(given, dict) and "anyOf" in given:
            _check(given, "anyOf")
            return f"({' | '.join(self._value(each, to) for each in given['anyOf'])})"
        _check(given, *{"object": _OBJECT, "array": ("type", "items")}.get("".join(kinds), ("type", "enum")))
        if "enum" in given:
            quote, choices = self.quote, given["enum"]
            quoted = [f"{quote}{each}{quote}" if isinstance(each, str) else json.dumps(each) for each in choices]
            return f"({' | '.join(map(to.text, quoted))})"
        if kinds == {"object"}:
            properties = given.get("properties", {}).items()
            values = {key: f"{to.text(key + ':')} {self._value(each, to)}" for key, each in properties}
            return f'"{{" {to.separated(values, given.get("required", ()), ",")} "}}"'
        if kinds == {"array"}:
            item = self._value(given.get("items", {}), to)
            return f'"[" ({item} ("," {item})*)? "]"'
        text = f"{to.text(self.quote)} {to.until(self.quote)}"
        plain = sorted(kinds - {"string", "object", "array"}) or ["number", "boolean", "null"]
        mixed = f"({to.json({'type': plain})}" + (f" | {text})" if not kinds or "string" in kinds else ")")
        return text if kinds == {"string"} else mixed


Style = JsonCall | NamedCall | TaggedCall | PythonCall | BraceCall
_OBJECT = ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
_FORMS: Mapping[str, type] = {"enum": list, "required": list, "anyOf": list, "properties": dict, "items": dict}
_NOTES = ("title", "description", "default", "examples", "deprecated", "$schema", "$comment")  # which bind nothing


def _check(schema: Any, *enforced: str) -> None:
    """Raise UsageError for a keyword that is not enforced where this is asked, or whose value has another type."""
    if not isinstance(schema, dict):
        raise UsageError(f"A tool's schema holds {shown(schema)} where this model needs an object; use an object.")
    for keyword, value in schema.items():
        if keyword not in (*enforced, *_NOTES):
            raise UsageError(
                f"In the form in which this model writes calls, {keyword!r} of a tool's schema cannot be enforced; "
                "leave it out, or leave out strict and tool_choice."
            )
        if not isinstance(value, form := _FORMS.get(keyword, object)):
            kind = "an array" if form is list else "an object"
            raise UsageError(f"{keyword!r} of a tool's schema is {shown(value)}; it must be {kind}.")


def _usual(schema: Any) -> Any:
    """Return a schema with `enum` for a `const`."""
    if not isinstance(schema, dict) or "const" not in schema or "enum" in schema:
        return schema
    return {"enum": [schema["const"]], **{name: each for name, each in schema.items() if name != "const"}}


_HEAD = re.compile(
    r'\{\s*(?:"(?:id|type|tool_call_id)"\s*:\s*"[^"]*"\s*,\s*)*"(?:name|tool_name)"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*'
)
_FIRST_KEYS = ('{"name":"', '{"type":"function","name":"')


def _may_be_call(text: str) -> bool:
    compact = "".join(text[: 4 * _LONGEST_HEAD].split())
    return any(key.startswith(compact) or compact.startswith(key) for key in _FIRST_KEYS)


def read_json(text: str) -> Any:
    """Return the value of JSON; ValueError for what can be written as no JSON again, such as NaN and 1e999."""
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


def _value_end(text: str, at: int, notation: str = "json") -> int | None:
    """Return where the value in brackets that begins at a place ends, or None if it goes on."""
    depth = 0
    for found in _NESTED[notation].finditer(text, at):
        depth += {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}.get(found[0], 0)
        if depth <= 0:
            return found.end()
    return None


def _types(schema: Any) -> set[str]:
    """Return the names of the JSON types that a schema allows, as far as it says so; empty if it does not."""
    if not isinstance(schema, Mapping):
        return set()
    given, *others = (schema.get(name) for name in ("type", "anyOf", "oneOf"))
    kinds = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
    return kinds.union(*(_types(each) for listed in others if isinstance(listed, list) for each in listed))


_OF_TYPE: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "object": dict,
    "array": list,
}  # fmt: skip


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value that a text stands for by its schema: itself for a string, and if nothing else fits."""
    kinds = _types(schema)
    if kinds == {"string"}:
        return text
    try:
        value = read_json(text)
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text, text)
    fits = any(isinstance(value, _OF_TYPE[kind]) for kind in kinds & _OF_TYPE.keys())
    is_number = isinstance(value, bool) and "boolean" not in kinds
    return value if not kinds or (fits and not is_number) else text


def _without_breaks(found: re.Match[str]) -> str:
    """Return a string with its line breaks escaped: models write them as they are, and Python takes none."""
    return re.sub(r"(?<!\\)\n", r"\\n", found[0].replace("\r", r"\r"))


def _python_value(node: ast.expr) -> Any:
    """Return the value of a literal; ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return json.loads(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_python_value(key) for key in node.keys if key is not None]
        return dict(zip(map(str, keys), map(_python_value, node.values), strict=True))  # ValueError for `**`
    return ast.literal_eval(node)
