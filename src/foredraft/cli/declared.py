"""What option dataclasses say of themselves: names, types, defaults, and the Attributes section of their docstrings.

Reads classes, or the source of a module that would be slow to import. Does not know what any option means.
"""

import ast
import dataclasses
import importlib.util
import inspect
import re
from dataclasses import dataclass
from functools import cache
from importlib.abc import InspectLoader
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_ENTRY = re.compile(r"(\w+): (.*)")
_LITERAL = re.compile(r"Literal\[(.*?)\]")


@dataclass(frozen=True, slots=True)
class Declared:
    """One option.

    Attributes:
        name: its name.
        type: its type, as Python writes it.
        default: its default; None also where there is none to show.
        required: whether it has no default.
        description: what the docstring says.
    """

    name: str
    type: str
    default: Any
    required: bool
    description: str


def options_of(kind: type) -> list[Declared]:
    """Return the options that a dataclass declares, in order."""
    described = attributes(inspect.getdoc(kind) or "")
    hints = get_type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        required = default is dataclasses.MISSING
        found.append(
            Declared(
                field.name, _type_name(hints[field.name]), None if required else default, required,
                described.get(field.name, ""),
            )
        )  # fmt: skip
    return found


@cache
def source_of(module: str) -> ast.Module:
    """Return a module's source, parsed without importing it; nothing where it is shipped without."""
    spec = importlib.util.find_spec(module)
    loader = spec.loader if spec is not None else None
    source = loader.get_source(module) if isinstance(loader, InspectLoader) else None
    return ast.parse(source or "")


def class_in_source(module: str, kind: str) -> ast.ClassDef | None:
    """Return class `kind` of a module's source, if it is there."""
    return next((each for each in source_of(module).body if isinstance(each, ast.ClassDef) and each.name == kind), None)


@cache
def options_in_source(module: str, kind: str) -> dict[str, Declared]:
    """Return the options of dataclass `kind` in `module` by name, without importing the module.

    Defaults are literals in such a class.
    """
    node = class_in_source(module, kind)
    if node is None:  # shipped without sources: help shows no descriptions, and everything else works
        return {}
    described = attributes(ast.get_docstring(node) or "")
    found = {}
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            name = field.target.id
            default = ast.literal_eval(field.value) if field.value is not None else None
            kind_of = _LITERAL.sub(lambda choices: choices[1].replace(", ", " | "), ast.unparse(field.annotation))
            found[name] = Declared(name, kind_of, default, field.value is None, described.get(name, ""))
    return found


def attributes(docstring: str) -> dict[str, str]:
    """Return the entries of a docstring's Attributes section: name to description."""
    found: dict[str, str] = {}
    name = ""
    section = docstring.partition("Attributes:\n")[2]
    for line in section.splitlines():
        entry = _ENTRY.fullmatch(line.strip())
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent == 0:
            break
        if entry is not None and indent == 4:
            name = entry[1]
            found[name] = entry[2]
        elif line.strip() and name:
            found[name] += " " + line.strip()
    return found


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(repr(choice) for choice in get_args(hint))
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return " | ".join(_type_name(part) for part in get_args(hint))
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
