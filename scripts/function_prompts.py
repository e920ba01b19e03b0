"""Write the functions of a folder of Python files as JSON lines of texts, as prompts for `foredraft train traces`.

    python scripts/function_prompts.py FOLDER OUT.jsonl

Only module-level functions with a docstring are used, so that a text begins like a code completion task: with name,
arguments and purpose. Tests and installed packages are left out.
"""

import ast
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from foredraft.training.sources import LEFT_OUT

SEED = 0


def functions(folder: Path) -> Iterator[str]:
    """Yield the source of each function of the folder's files that Python can parse."""
    for path in sorted(folder.rglob("*.py")):
        if LEFT_OUT.intersection(path.relative_to(folder).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                yield ast.get_source_segment(source, node) or ""


def main() -> None:
    """Write the output file, with its lines shuffled."""
    folder, out = map(Path, sys.argv[1:])
    found = list(functions(folder))
    random.Random(SEED).shuffle(found)  # noqa: S311  # nothing secret is drawn
    out.write_text("".join(json.dumps({"text": each}) + "\n" for each in found))
    print(f"{out}: {len(found):,} functions.")


if __name__ == "__main__":
    main()
