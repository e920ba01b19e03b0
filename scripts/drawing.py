"""The style of the pictures in the documentation."""

import io
from typing import Any

COLORS = ("#0b66b0", "#c8500a", "#07825f", "#a8437f", "#8a6a00", "#5a57c9", "#6b7280", "#b02a37")
"""Of methods or libraries, in the order in which they are named."""
_INK, _FAINT = "#1f2328", "#d8dde3"
STYLE: Any = {  # matplotlib types the keys one by one
    "font.size": 11.5, "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _FAINT, "xtick.color": _INK,
    "ytick.color": _INK, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "grid.color": _FAINT, "grid.linewidth": 0.7,
}  # fmt: skip
_WIDTH, _RESOLUTION = 6.4, 160  # inches, dots per inch


def new_figure(height: float) -> Any:
    """Return an empty matplotlib figure, `height` inches high."""
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), dpi=_RESOLUTION, layout="constrained")


def png(figure: Any) -> bytes:
    """Return a figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
