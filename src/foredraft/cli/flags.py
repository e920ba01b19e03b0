"""Options shared by several commands, and the names, defaults and descriptions of option dataclasses.

Dataclasses are parsed from source without an import, because importing torch takes seconds. Does not depend on what an
option does.
"""

import ast
import importlib.util
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, partial, wraps
from importlib.abc import InspectLoader
from inspect import Parameter, Signature, signature
from itertools import chain, takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.errors import UsageError
from foredraft.model.gguf.files import SMOLLM2
from foredraft.options import user_path

in_model = partial(typer.Option, rich_help_panel="The model")
in_drafting = partial(typer.Option, rich_help_panel="Drafting, which never changes the text")
in_text = partial(typer.Option, rich_help_panel="The text")

_LITERAL = re.compile(r"Literal\[(.*?)\]")
_COMMENT = re.compile(" *#")
_MODEL = "smollm2, a GGUF file, OWNER/REPO:KIND for one of the hub, a hub id, or a folder"

ModelArgument = Annotated[str, typer.Argument(help=_MODEL)]
ModelOption = Annotated[str, in_model(help=_MODEL)]
DtypeOption = Annotated[str, in_model(help="auto: the checkpoint's; float32 compares exactly; q8_0, q4_0 round")]
DeviceOption = Annotated[str | None, in_model(help="cpu, cuda, auto (spread); default: the first GPU, or the CPU")]
EagerOption = Annotated[bool, in_model("--eager", help="Run the uncompiled model")]

MethodOption = Annotated[str | None, in_drafting(help="How to draft; see foredraft methods")]
MethodsOption = Annotated[list[str] | None, in_drafting("--method", help='NAME or NAME:{"option": value}; repeatable')]
MemoryOption = Annotated[str | None, in_drafting(help="Folder that keeps texts for later drafts; default: none")]

PromptArgument = Annotated[str | None, typer.Argument(help="What to continue or answer; - reads standard input")]
FileOption = Annotated[Path | None, in_text(help="Read the prompt from this file")]
SystemOption = Annotated[str | None, in_text(help="A system message before the prompt")]
TokensOption = Annotated[int, in_text("--max-new-tokens", help="Maximum number of tokens of a text")]
TemperatureOption = Annotated[float, in_text(help="0 is greedy")]
SeedOption = Annotated[int, in_text(help="Seed of the sampling")]

DataOption = Annotated[Path | None, in_text(help="Folder of the tasks' files; the embedded set needs none")]
TaskOption = Annotated[
    list[str] | None,
    in_text(
        help="Repeatable: a task, TASK/CATEGORY, FILE, or FILE:FIELD; default: embedded, or with --data three tasks"
    ),
]
PromptsOption = Annotated[int, in_text(help="Prompts per task, or per category of a task")]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]
ColorOption = Annotated[
    bool | None, typer.Option("--color/--no-color", help="Colour drafted tokens; default: on a terminal")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists")]


def generation_flag(name: str, description: str = "") -> Any:
    """Return the option of a generation argument, with the library's default, and its description if none is given."""
    declared = options_in_source("foredraft.request", "GenerationOptions").get(name, {})
    default, description = declared.get("default"), description or declared.get("description", "")
    shown = "" if default in (None, ()) else f"; default: {default}"
    return in_text(help=f"{description[:1].upper()}{description[1:]}{shown}", show_default=False)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with each parameter that is a dataclass replaced by one option for each of its fields."""
    taken = signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: each.annotation for name, each in taken.items() if is_dataclass(each.annotation)}

    @wraps(command)
    def run(**given: Any) -> None:
        if (out := given.get("out")) is not None:
            given["out"] = user_path(out)  # shells leave the ~ of --out=~/store as it is
            others = (each for name, each in given.items() if name != "out")
            check_output(
                given["out"], chain.from_iterable(each if isinstance(each, list) else [each] for each in others)
            )
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    shown: list[Parameter] = []
    for name, each in taken.items():
        shown += signature(groups[name]).parameters.values() if name in groups else [each]
    vars(run)["__signature__"] = Signature([each.replace(kind=Parameter.KEYWORD_ONLY) for each in shown])
    return run


def check_output(out: Path, inputs: Iterable[Any]) -> None:
    """Raise UsageError if one of these is the file or folder `out`, or a field of it (FILE:FIELD)."""
    for each in (str(each) for each in inputs if isinstance(each, str | Path)):
        if any(_is_same(out, place) for place in (each, each.rpartition(":")[0])):
            raise UsageError(f"{out} is an input of this command and would be replaced. Name another --out.")


def _is_same(path: Path, named: str) -> bool:
    with suppress(OSError, RuntimeError, ValueError):  # there is nothing, or it is no path
        return named not in ("", SMOLLM2) and Path(named).expanduser().samefile(path)
    return False


# --- dataclasses in source


@cache
def source_of(module: str) -> str:
    """Return a module's source, without importing it; empty if it is shipped without source."""
    spec = importlib.util.find_spec(module)
    loader = spec.loader if spec is not None else None
    return (loader.get_source(module) if isinstance(loader, InspectLoader) else None) or ""


@cache
def class_body(module: str, kind: str) -> tuple[list[ast.stmt], list[str]]:
    """Return the statements and the bases of class `kind` in a module's source; none without source."""
    classes = (each for each in ast.parse(source_of(module)).body if isinstance(each, ast.ClassDef))
    found = next((each for each in classes if each.name == kind), None)
    return ([], []) if found is None else (found.body, [ast.unparse(base) for base in found.bases])


def options_in_source(module: str, kind: str) -> dict[str, dict[str, Any]]:
    """Return the fields of dataclass `kind` in `module`, and of its bases there, by name; empty without source.

    Each has `name`, `type`, `description`, which is the comments above and after it, and `default` unless it is
    required; a default that is not a literal is its source text.
    """
    lines, (body, bases) = source_of(module).splitlines(), class_body(module, kind)
    found: dict[str, dict[str, Any]] = {}
    for base in bases:
        found |= options_in_source(module, base)
    for field in body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            name, last = field.target.id, field.end_lineno or field.lineno
            type_ = _LITERAL.sub(lambda choices: choices[1].replace(", ", " | "), ast.unparse(field.annotation))
            above = [*takewhile(_COMMENT.match, reversed(lines[: field.lineno - 1]))][::-1]
            said = [line.partition("# ")[2] for line in (*above, lines[last - 1])]
            found[name] = {"name": name, "type": type_, "description": " ".join(filter(None, said))}
            if field.value is not None:
                try:
                    found[name]["default"] = ast.literal_eval(field.value)
                except ValueError:
                    found[name]["default"] = ast.unparse(field.value)
    return found
