"""What verifying n rows costs, kept beside the cells of the model that it was measured with.

Knows a file's place and form; the measuring is the generator's.
"""

import json
from pathlib import Path

from foredraft.api import Generator
from foredraft.bench.cell import write_result
from foredraft.contracts import CostCurve
from foredraft.model.cost import sound_curve

COST_FILE = "verification.json"
_VERSION = 1


def keep_cost(generator: Generator, model: str, folder: Path) -> None:
    """Write the cost curve into the folder of cells, unless it is there.

    Raises:
        StoreError: it cannot be written.
    """
    if read_cost(folder) is not None:
        return
    curve = generator.cost
    body = {"version": _VERSION, "model": model, "rows": curve.rows, "seconds": curve.seconds}
    write_result(folder / COST_FILE, (json.dumps(body) + "\n").encode())


def read_cost(folder: Path) -> CostCurve | None:
    """Return the curve; None where there is none that can be read."""
    try:
        body = json.loads((folder / COST_FILE).read_text(encoding="utf-8"))
        if body["version"] != _VERSION:
            return None
        return sound_curve(body["rows"], body["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
