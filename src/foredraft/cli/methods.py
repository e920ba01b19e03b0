"""`foredraft methods`: lists the drafting methods, or controls, with the options that their classes declare.

Includes third-party methods. Does not depend on any method.
"""

import ast
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from foredraft.cli.flags import JsonOption, class_body, options_in_source, source_of
from foredraft.cli.screen import show_json, show_table
from foredraft.errors import UsageError
from foredraft.options import check_known

_METHOD_USAGE = (
    "Options go into --speculative-config as JSON, such as '{\"depth\": 8}'; every method also takes "
    "num_speculative_tokens, the number of drafted tokens per step, and control: see foredraft methods --controls."
)
_CONTROL_USAGE = (
    "A control decides how much each step drafts, with any method, as in --speculative-config "
    '\'{"control": "exit_threshold", "control_options": {"cap": 5}}\'. num_speculative_tokens caps it, and alone '
    "selects fixed."
)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show only this one")] = None,
    controls: Annotated[bool, typer.Option("--controls", help="List the controls of the draft length instead")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the drafting methods and their options."""
    from foredraft.control import CONTROLS
    from foredraft.drafters import method_names

    names = list(CONTROLS) if controls else method_names()
    if name is not None:
        kind = "control" if controls else "method"
        check_known(name, names, f"There is no {kind}", f"{kind.capitalize()}s are")
    found = entries(names if name is None else [name], controls=controls)
    if as_json:
        show_json(found)
        return
    for entry in found:
        typer.echo(f"{entry['name']}{' (default)' if entry['default'] else ''}: {entry['summary']}")
        if len(found) == 1 and entry["about"]:
            typer.echo(entry["about"])
        rows = []
        for each in entry["options"]:
            default = json.dumps(each["default"]) if "default" in each else "required"
            rows.append((each["name"], default, each["type"], each["description"]))
        show_table(("option", "default", "type", "description"), rows)
    typer.echo(_CONTROL_USAGE if controls else _METHOD_USAGE)


def entries(names: Sequence[str], *, controls: bool) -> list[dict[str, Any]]:
    """Describe methods or controls, for JSON: name, whether it is the default, summary, more about it, and options."""
    return [_control(each) if controls else _method(each) for each in names]


def _control(name: str) -> dict[str, Any]:
    from foredraft.control import CONTROLS, choose_control

    kind = CONTROLS[name]
    return _entry(name, name == choose_control().name, kind.summary, "", kind.options.__module__, kind.options.__name__)


def _method(name: str) -> dict[str, Any]:
    from foredraft.drafters import drafter_class, own_place
    from foredraft.speculation import DEFAULT_METHOD

    place, default = own_place(name), name == DEFAULT_METHOD
    if place is not None:  # read from source, because an import would import torch
        module, _, class_name = place.partition(":")
        declared: dict[str, ast.expr] = {}
        for each in class_body(module, class_name)[0]:
            if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
                declared[ast.unparse(each.targets[0] if isinstance(each, ast.Assign) else each.target)] = each.value
        summary, options = ast.literal_eval(declared["summary"]), ast.unparse(declared["Options"])
        return _entry(name, default, summary, ast.get_docstring(ast.parse(source_of(module))), module, options)
    try:
        kind = drafter_class(name)
    except UsageError as error:  # a registered method that cannot be imported must not hide the others
        return {"name": name, "default": default, "summary": str(error), "about": "", "options": []}
    about = sys.modules[kind.create.__module__].__doc__
    return _entry(name, default, kind.summary, about, kind.Options.__module__, kind.Options.__name__)


def _entry(name: str, default: bool, summary: str, docstring: str | None, module: str, options: str) -> dict[str, Any]:
    """Return one line of the list; the second paragraph of a drafter's module tells its paper and requirements."""
    about = " ".join((docstring or "").split("\n\n")[1:2]).replace("\n", " ")
    listed = list(options_in_source(module, options).values())
    return {"name": name, "default": default, "summary": summary, "about": about, "options": listed}
