"""`foredraft methods`: every drafting method, or control, with its options, as the classes that own them declare them.

Does not know any of them; third-party methods are listed like foredraft's own.
"""

import ast
import json
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from foredraft.cli.declared import Declared, class_in_source, options_in_source, options_of, source_of
from foredraft.errors import UsageError
from foredraft.options import nearest

_OF_METHODS = (
    "Options go into --speculative-config as JSON, such as '{\"depth\": 8}'; every method also takes "
    "num_speculative_tokens, which fixes how many tokens a step drafts, and control: see foredraft methods --controls."
)
_OF_CONTROLS = (
    "A control says how much a step drafts, with any method, as in --speculative-config "
    '\'{"control": "confidence", "control_options": {"threshold": 0.5}}\'. num_speculative_tokens caps it, and alone '
    "means fixed."
)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this one only")] = None,
    controls: Annotated[bool, typer.Option("--controls", help="List the controls instead: how much to draft")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """List the drafting methods and their options.

    Raises:
        UsageError: a name that no method, or control, has.
    """
    if controls:
        from foredraft.control import CONTROLS

        names = list(CONTROLS)
    else:
        from foredraft.drafters import method_names

        names = method_names()
    if name is not None:
        kind = "control" if controls else "method"
        if name not in names:
            raise UsageError(f"There is no {kind} {name!r}; choose one of {', '.join(names)}.{nearest(name, names)}")
        names = [name]
    found = [_control(each) if controls else _described(each) for each in names]
    if as_json:
        typer.echo(json.dumps(found, indent=2, default=str))
    else:
        _print(found, _OF_CONTROLS if controls else _OF_METHODS)


def _control(name: str) -> dict[str, Any]:
    from foredraft.control import CONTROLS, choose_control

    kind = CONTROLS[name]
    default = name == choose_control().name
    return {"name": name, "default": default, "summary": kind.summary, "options": _shown(options_of(kind.options))}


def _shown(options: Iterable[Declared]) -> list[dict[str, Any]]:
    return [
        {"name": each.name, "type": each.type, "description": each.description}
        | ({} if each.required else {"default": each.default})
        for each in options
    ]


def _described(name: str) -> dict[str, Any]:
    from foredraft.drafters import drafter_class, own_place
    from foredraft.speculation import DEFAULT_METHOD

    entry = {"name": name, "default": name == DEFAULT_METHOD, "summary": "", "about": "", "options": []}
    place = own_place(name)
    if place is not None and (read := _read(*place.split(":"))):
        return entry | read
    try:
        kind = drafter_class(name)
    except UsageError as error:  # a registered method that cannot be imported must not hide the others
        return entry | {"summary": str(error)}
    about = _about(sys.modules[kind.create.__module__].__doc__)
    return entry | {"summary": kind.summary, "about": about, "options": _shown(options_of(kind.Options))}


def _read(module: str, kind: str) -> dict[str, Any]:
    """Return what a drafter's source says of it; importing it would import torch. Nothing where it says too little."""
    node = class_in_source(module, kind)
    said: dict[str, ast.expr] = {}
    for each in node.body if node is not None else ():
        target = each.targets[0] if isinstance(each, ast.Assign) else getattr(each, "target", None)
        if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None and isinstance(target, ast.Name):
            said[target.id] = each.value
    options = said.get("Options")
    if "summary" not in said or not isinstance(options, ast.Name):
        return {}
    return {
        "summary": ast.literal_eval(said["summary"]),
        "about": _about(ast.get_docstring(source_of(module))),
        "options": _shown(options_in_source(module, options.id).values()),
    }


def _about(docstring: str | None) -> str:
    """Return the second paragraph of a drafter's module: its paper, and what it needs."""
    return " ".join((docstring or "").split("\n\n")[1:2]).replace("\n", " ")


def _print(found: list[dict[str, Any]], closing: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for entry in found:
        mark = " (default)" if entry["default"] else ""
        console.print(Text.assemble((entry["name"], "bold"), f"{mark}: {entry['summary']}"))
        if len(found) == 1 and entry.get("about"):
            console.print(Text(entry["about"]))
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column()
        for option in entry["options"]:
            value = json.dumps(option["default"], default=str) if "default" in option else "required"
            choices = f" ({option['type']})"
            grid.add_row(Text(f"  {option['name']} = {value}"), Text(f"{option['description']}{choices}"))
        if entry["options"]:
            console.print(grid)
        console.print()
    console.print(Text(closing))
