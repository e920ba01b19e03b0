"""`foredraft methods`: every drafting method with its options, read off the classes that own them.

Does not know any method; third-party ones are listed like foredraft's own.
"""

import json
from typing import Annotated, Any

import typer

from foredraft.errors import UsageError


def methods(as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False) -> None:
    """List the drafting methods and their options."""
    from foredraft.drafters import method_names

    found = [_described(name) for name in method_names()]
    if as_json:
        typer.echo(json.dumps(found, indent=2, default=str))
    else:
        _print(found)


def _described(name: str) -> dict[str, Any]:
    from foredraft.api import DEFAULT_METHOD
    from foredraft.cli.declared import options_of
    from foredraft.drafters import drafter_class

    entry: dict[str, Any] = {"name": name, "default": name == DEFAULT_METHOD, "summary": "", "options": []}
    try:
        kind = drafter_class(name)
    except UsageError as error:  # a registered method that cannot be imported must not hide the others
        return entry | {"summary": str(error)}
    options = [
        {"name": each.name, "type": each.type, "description": each.description}
        | ({} if each.required else {"default": each.default})
        for each in options_of(kind.Options)
    ]
    return entry | {"summary": kind.summary, "options": options}


def _print(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for entry in found:
        mark = " (default)" if entry["default"] else ""
        console.print(Text.assemble((entry["name"], "bold"), f"{mark}: {entry['summary']}"))
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
    console.print(
        Text(
            "Options go into --speculative-config as JSON, such as '{\"depth\": 8}'; every method also takes "
            "num_speculative_tokens, which fixes how many tokens a step drafts."
        )
    )
