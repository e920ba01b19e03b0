"""What option dataclasses say of themselves: names, types, defaults, and the Attributes section of their docstrings.

Reads the source of modules, without importing them: torch takes seconds. Does not know what any option means.
"""

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from importlib.abc import InspectLoader
from typing import Any

_ENTRY = re.compile(r"(\w+): (.*)")
_LITERAL = re.compile(r"Literal\[(.*?)\]")


@dataclass(frozen=True, slots=True)
class Declared:
    """One option.

    Attributes:
        name: its name.
        type: its type, as Python writes it.
        default: its default; where that is no literal, how the source spells it.
        required: whether it has no default.
        description: what the docstring says.
    """

    name: str
    type: str
    default: Any
    required: bool
    description: str


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
    """Return the options of dataclass `kind` in `module` by name; none where the module is shipped without source."""
    node = class_in_source(module, kind)
    if node is None:
        return {}
    described = attributes(ast.get_docstring(node) or "")
    found = {}
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            name = field.target.id
            kind_of = _LITERAL.sub(lambda choices: choices[1].replace(", ", " | "), ast.unparse(field.annotation))
            found[name] = Declared(name, kind_of, _value(field.value), field.value is None, described.get(name, ""))
    return found


def _value(node: ast.expr | None) -> Any:
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


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
