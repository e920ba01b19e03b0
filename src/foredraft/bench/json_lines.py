"""Files of JSON lines, plain or gzip: whole, or refused with a sentence.

Knows lines; what a row has to hold, those who ask know.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft.errors import UsageError


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and the value of every line that is not empty.

    Raises:
        UsageError: the file cannot be read, or a line is not JSON.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _value(line, path, number)
    except (OSError, EOFError) as error:
        raise UsageError(f"The file {path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"The file {path} is not text in UTF-8 ({error}); convert it first.") from error


def _value(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UsageError(f"Line {number} of {path} is not JSON ({error}); give one value a line.") from error
