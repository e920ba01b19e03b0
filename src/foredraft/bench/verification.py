"""What verifying n rows costs, kept beside the cells of the model that it was measured with.

Knows a file's place and form; the measuring is the generator's.
"""

import json
from pathlib import Path

from foredraft.api import Generator
from foredraft.atomic_file import write_file
from foredraft.contracts import CostCurve
from foredraft.errors import StoreError

COST_FILE = "verification.json"
_VERSION = 1


def keep_cost(generator: Generator, model: str, folder: Path) -> None:
    """Write the cost curve into the folder of cells, unless it is there.

    Raises:
        StoreError: it cannot be written.
    """
    path = folder / COST_FILE
    if read_cost(folder) is not None:
        return
    curve = generator.cost
    body = {"version": _VERSION, "model": model, "rows": curve.rows, "seconds": curve.seconds}
    try:
        write_file(path, (json.dumps(body) + "\n").encode())
    except OSError as error:
        raise StoreError(f"The file {path} cannot be written ({error.strerror}).") from error


def read_cost(folder: Path) -> CostCurve | None:
    """Return the curve; None where there is none that can be read."""
    try:
        body = json.loads((folder / COST_FILE).read_text(encoding="utf-8"))
        if body["version"] != _VERSION:
            return None
        return CostCurve(tuple(map(int, body["rows"])), tuple(map(float, body["seconds"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None
