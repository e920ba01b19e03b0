"""What option dataclasses say of themselves: names, types, defaults, and the Attributes section of their docstrings.

Reads the source of modules, without importing them: torch takes seconds. Does not know what any option means.
"""

import ast
import importlib.util
import re
from functools import cache
from importlib.abc import InspectLoader
from typing import Any

_LITERAL = re.compile(r"Literal\[(.*?)\]")
_ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


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
def options_in_source(module: str, kind: str) -> dict[str, dict[str, Any]]:
    """Return the options of dataclass `kind` in `module` by name; none where the module is shipped without source.

    Of each its `name`, `type`, `description`, and `default` unless it is required; a default that is no literal is as
    the source spells it.
    """
    node = class_in_source(module, kind)
    described = attributes(ast.get_docstring(node) or "") if node is not None else {}
    found: dict[str, dict[str, Any]] = {}
    for field in node.body if node is not None else ():
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            name = field.target.id
            written = _LITERAL.sub(lambda choices: choices[1].replace(", ", " | "), ast.unparse(field.annotation))
            found[name] = {"name": name, "type": written, "description": described.get(name, "")}
            if field.value is not None:
                found[name]["default"] = _value(field.value)
    return found


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def attributes(docstring: str) -> dict[str, str]:
    """Return the entries of a docstring's Attributes section: name to description."""
    section = re.split(r"^(?=\S)", docstring.partition("Attributes:\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return {name: " ".join(words.split()) for name, words in _ENTRY.findall(section)}
