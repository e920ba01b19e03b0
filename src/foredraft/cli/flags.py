"""Options that several verbs take, each typed once.

Knows names, types and help texts; what an option means is the library's.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.cli.declared import options_in_source

in_model = partial(typer.Option, rich_help_panel="The model")
in_drafting = partial(typer.Option, rich_help_panel="Drafting, which never changes the text")
in_text = partial(typer.Option, rich_help_panel="The text")

_MODEL = "smollm2, a GGUF file, a hub id, or a folder"

ModelArgument = Annotated[str, typer.Argument(help=_MODEL)]
ModelOption = Annotated[str, in_model(help=_MODEL)]
DtypeOption = Annotated[str, in_model(help="auto takes the checkpoint's; float32 compares exactly")]
DeviceOption = Annotated[str | None, in_model(help="cpu, cuda, auto (spread); else the first GPU or the CPU")]
EagerOption = Annotated[bool, in_model("--eager", help="Run the model as it is, also where it is compiled")]

MethodOption = Annotated[str | None, in_drafting(help="How to draft; see foredraft methods")]
MethodsOption = Annotated[list[str] | None, in_drafting("--method", help='NAME or NAME:{"option": value}; repeatable')]
ConfigOption = Annotated[str | None, in_drafting(help="The method's options, as a JSON object")]
NodesOption = Annotated[
    int | None, in_drafting(help="Draft this many a step; else as many as the measured cost repays")
]
BudgetsOption = Annotated[
    list[int] | None, in_drafting("--nodes", help="Node budgets; repeatable [default: 16 and 64]")
]
MemoryOption = Annotated[
    str | None, in_drafting(help="Folder that keeps what was said, for later drafts; off unless it is named")
]

PromptArgument = Annotated[str | None, typer.Argument(help="What to continue or answer; - reads standard input")]
FileOption = Annotated[Path | None, in_text(help="Read the prompt from this file")]
SystemOption = Annotated[str | None, in_text(help="A system message before the prompt")]
TokensOption = Annotated[int, in_text("--max-new-tokens", help="Tokens of a text at most")]
TemperatureOption = Annotated[float, in_text(help="0 is greedy")]
TopPOption = Annotated[float, in_text(help="Where a temperature is given")]
SeedOption = Annotated[int, in_text(help="Of the sampling")]

DataOption = Annotated[
    Path | None, in_text(help="Folder of the tasks' files; without it, the embedded set, and others from the hub")
]
TaskOption = Annotated[
    list[str] | None,
    in_text(
        help="Repeatable: a task, TASK/CATEGORY, FILE, or FILE:FIELD [default: embedded; with --data, three tasks]"
    ),
]
PromptsOption = Annotated[int, in_text(help="Prompts of a task, or of a category of a task")]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]
ColorOption = Annotated[
    bool | None, typer.Option("--color/--no-color", help="Colour drafted tokens; else on a terminal only")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists")]


def generation_flag(name: str, words: str = "") -> Any:
    """Return the option of a generation argument, with the library's default and description, or with `words`."""
    declared = options_in_source("foredraft.request", "GenerationOptions").get(name, {})
    default, words = declared.get("default"), words or declared.get("description", "")
    shown = str(default) if default not in (None, ()) else False
    return in_text(help=words[:1].upper() + words[1:].rstrip("."), show_default=shown)
