"""Write docs/reference/structure.md: one line for each module, from its docstring's first sentence.

Reads the sources without importing them. `--check` writes nothing and exits 1 when the page is out of date.
"""

import argparse
import ast
import re
import sys
import textwrap
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "src" / "foredraft"
PAGE = REPOSITORY / "docs" / "reference" / "structure.md"

HEAD = """# Structure

One line for each module, from the first sentence of its docstring. Made by `make docs`; do not edit.
"""


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring.

    Raises:
        SystemExit: the module has no docstring.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise SystemExit(f"{path.relative_to(REPOSITORY)} has no docstring; say in a sentence what it does.")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph, maxsplit=1)[0]


def wrapped(item: str) -> str:
    """Return a list item with line ends, none in a word or a link."""
    return textwrap.fill(item, 140, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def page() -> str:
    """Return the page: the package's own modules first, then one section for each folder."""
    parts = [HEAD]
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        inside = folder.relative_to(PACKAGE.parent).as_posix()
        parts.append(f"\n## {inside}/\n")
        door = folder / "__init__.py"
        if door.exists():
            parts.append(f"\n{first_sentence(door)}\n")
        modules = [path for path in sorted(folder.glob("*.py")) if path != door]
        lines = [wrapped(f"- `{path.name}`: {first_sentence(path)}") for path in modules]
        if lines:
            parts.append("\n" + "".join(lines))
    return "".join(parts)


def main() -> None:
    """Write the page, or with `--check` compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when the page is out of date; write nothing")
    wanted = page()
    if not parser.parse_args().check:
        PAGE.write_text(wanted, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != wanted:
        sys.exit(f"{PAGE.relative_to(REPOSITORY)} is out of date; run `make docs`.")


if __name__ == "__main__":
    main()
