"""Write docs/reference/commands.md: what `foredraft --help` says for every command.

The same on every terminal: 100 columns, no colours, no boxes. `--check` writes nothing and exits 1 when the page is
out of date.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "reference" / "commands.md"
WIDTH = 100

HEAD = """# Commands

What `--help` says for every command. Made by `make docs`; do not edit.
"""


def root_command() -> Any:
    """Return the click command behind `foredraft`, or None while `foredraft.cli` has no `app`."""
    os.environ["TYPER_USE_RICH"] = "0"  # read when typer is imported: no boxes, whose look depends on the terminal
    sys.path.insert(0, str(REPOSITORY / "src"))
    app = getattr(importlib.import_module("foredraft.cli"), "app", None)
    return None if app is None else importlib.import_module("typer.main").get_command(app)


def sections(command: Any, name: str, parent: Any = None) -> Iterator[str]:
    """Yield the section of a command, then those of the commands under it."""
    context = command.context_class(
        command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH, color=False
    )
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    yield f"\n## {context.command_path}\n\n```text\n{text}\n```\n"
    for below in command.list_commands(context) if hasattr(command, "list_commands") else ():
        member = command.get_command(context, below)
        if not member.hidden:
            yield from sections(member, below, context)


def main() -> None:
    """Write the page, or with `--check` compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when the page is out of date; write nothing")
    checking = parser.parse_args().check
    command = root_command()
    if command is None:
        print("foredraft.cli has no `app` yet, so there are no help pages to write.")
        return
    wanted = HEAD + "".join(sections(command, "foredraft"))
    if not checking:
        PAGE.write_text(wanted, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != wanted:
        sys.exit(f"{PAGE.relative_to(REPOSITORY)} is out of date; run `make docs`.")


if __name__ == "__main__":
    main()
