"""The `foredraft` command: its subcommands parse arguments and print results.

Turns every exception into a message on standard error and an exit status: 2 for wrong usage, 130 for Ctrl-C (128 + the
signal's number, as in shells), 1 for other errors. Does not depend on how the work is done.
"""

import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from errno import ENOSPC
from shutil import get_terminal_size
from typing import Annotated, Any

import typer

from foredraft import __version__
from foredraft.cli import bench, chat, demo, generate, info, methods, prove, serve, stores, train
from foredraft.cli.flags import with_groups
from foredraft.cli.screen import say
from foredraft.errors import ForedraftError, ForedraftWarning, UsageError, told
from foredraft.options import nearest

TRACEBACK_VARIABLE = "FOREDRAFT_TRACEBACK"
_PANELS_FIT = 80  # columns, a terminal's usual width; below, help in panels cut names of options in 11 commands
COMPLETION_VARIABLE = "_FOREDRAFT_COMPLETE"  # set by the script that --install-completion writes

VERBS: Mapping[str, Callable[..., None] | typer.Typer] = {
    "generate": generate.generate, "chat": chat.chat, "serve": serve.serve, "demo": demo.demo,
    "methods": methods.methods, "info": info.info, "recommend": bench.recommend, "compile": info.compile_model,
    "table": stores.table, "index": stores.index,
    "prove": prove.prove, "bench": bench.app, "train": train.app,
}  # fmt: skip
"""Subcommands in the order of the help. They import torch and transformers inside functions, so that help is fast."""

app = typer.Typer(
    name="foredraft",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The same text from a language model in fewer forward passes: exact speculative decoding.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit")
    ] = False,
) -> None:
    pass


for verb, member in VERBS.items():
    if isinstance(member, typer.Typer):
        for command in member.registered_commands:
            command.callback = None if command.callback is None else with_groups(command.callback)
        app.add_typer(member, name=verb)
    else:
        app.command(verb)(with_groups(member))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments`, or the process's own, and return the exit status."""
    for name, value in (("TRANSFORMERS_VERBOSITY", "error"), ("TQDM_DISABLE", "1"), ("HF_HUB_VERBOSITY", "error")):
        os.environ.setdefault(name, value)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks must not end a text
    warnings.showwarning = _show_warning  # type: ignore[assignment]  # it ignores the source location
    try:
        status = _run(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone: flushing the buffer at exit must not fail again
        with suppress(OSError, ValueError):  # a stream without a file has nothing to flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        say("Interrupted.")
        return 130
    except Exception as error:  # noqa: BLE001  # every error becomes a message and a status
        return _explain(error)
    return status


def _show_warning(message: Warning | str, category: type[Warning], *_where: object) -> None:
    if issubclass(category, ForedraftWarning):
        say(str(message), "yellow")


def _run(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    _adapt_help(command)
    if COMPLETION_VARIABLE in os.environ:  # answers the shell's completion request, and exits
        try:
            command.main(arguments, prog_name="foredraft")
        except SystemExit as ended:  # fish reads the status
            return int(ended.code or 0)
    try:  # not `command.main`, which handles interrupts and broken pipes itself and draws boxes around messages
        with command.make_context("foredraft", arguments) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return int(ended.exit_code)
    return 0


def _adapt_help(command: Any, parent: Any = None) -> None:
    """Show flags without a type, as `--json` takes no value, and the names of options in full on a narrow terminal."""
    context = command.context_class(command, parent=parent, **command.context_settings)
    if get_terminal_size().columns < _PANELS_FIT:
        command.rich_markup_mode = None
    for each in command.get_params(context):
        if getattr(each, "is_flag", False):
            each.metavar = ""
    for member in getattr(command, "commands", {}).values():
        _adapt_help(member, context)


def _explain(error: Exception) -> int:
    """Print the message of an error, and return the exit status."""
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    if isinstance(error, ForedraftError):
        say(str(error))
        return 2 if isinstance(error, UsageError) else 1
    if isinstance(error, OSError) and error.errno == ENOSPC:
        say(f"{error.filename or 'The output'} cannot be written ({error.strerror}). Free space, or choose another.")
        return 1
    if isinstance(error, OSError) and error.filename:
        say(f"{error.filename} cannot be used ({error.strerror}). Give another file or folder, or mend this one.")
        return 1
    if not hasattr(error, "format_message"):  # only the parser's exceptions have it; typer does not export their base
        say(f"Unexpected {told(error).rstrip('.: ')}. Set {TRACEBACK_VARIABLE}=1 to see the traceback.")
        return 1
    message = str(error.format_message())
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help page
        sys.stderr.write(message)
        return 2
    context, unknown = getattr(error, "ctx", None), getattr(error, "option_name", None)
    command = context.command_path if context is not None else "foredraft"
    if context is not None and unknown is not None and hasattr(error, "possibilities"):
        names = [flag for each in context.command.get_params(context) for flag in each.opts]
        if (argument := unknown.lstrip("-")) in names:  # such as `serve --model`, as other commands have it
            message = f"There is no option {unknown}; give it without a name: {command} {argument.upper()}"
        else:
            known = [name for name in names if name.startswith("--")]
            message = f"There is no option {unknown}.{nearest(unknown, known)}"
    say(f"{message.rstrip('.')}. See {command} --help.".replace("?.", "?"))
    return 2
