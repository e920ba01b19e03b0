"""Write the picture of the first text of `foredraft demo`, in which drafted tokens have the colours of their sources.

`python scripts/drafted_picture.py docs/pictures/drafted.svg`, after `foredraft compile`.
"""

import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

import foredraft
from foredraft.bench.demonstration import SCENES
from foredraft.cli.screen import PALETTE

WIDTH = 90  # columns


def main() -> None:
    """Write the text, and the picture of it."""
    generator, scene = foredraft.load(), SCENES[0]
    styles = dict(zip(generator.drafter.source_names, PALETTE, strict=False))
    text = Text()
    for piece in generator.stream([{"role": "user", "content": scene.prompt}], **scene.options):
        text.append(piece.text, styles.get(piece.drafted_by or ""))
    drafted = {span.style for span in text.spans}
    legend = Text("\n").join(Text(name, style) for name, style in styles.items() if style in drafted)
    console = Console(record=True, width=WIDTH, file=StringIO(), highlight=False)
    console.print(text, Text("\nDrafted by:"), legend, Text("not drafted"), sep="\n")
    Path(sys.argv[1]).write_text(console.export_svg(title=scene.title), encoding="utf-8")


if __name__ == "__main__":
    main()
