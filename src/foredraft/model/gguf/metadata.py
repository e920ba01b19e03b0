"""The header of a GGUF file: its keys and values, of which it is known which were read, and the places of its tensors.

Does not know what keys mean, and reads no tensors.
"""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foredraft.errors import UsageError, told

_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""The format's type of a value -> NumPy's dtype; types 8 and 9 are strings and arrays."""
_U32, _STRING, _ARRAY, _U64 = 4, 8, 9, 10
_ALIGNMENT = 32
"""Tensors begin at multiples of so many bytes where a file does not say `general.alignment`, as the format has it."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a file's tensors by name, rows first, as torch has them."""


class Place(NamedTuple):
    """Where a tensor lies in its file, and how it is stored."""

    shape: tuple[int, ...]  # rows first, as torch has it
    kind: int  # the format's type, as `gguf.GGMLQuantizationType`
    offset: int  # in bytes, from the file's begin


class Metadata:
    """The keys and values of a file's header; remembers which keys were read.

    Attributes:
        architecture: the value of `general.architecture`, such as "llama".
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self._read = values, set[str]()
        self.architecture = str(self.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value, an int, float, bool, str, or list of one of them, and count the key as read."""
        self._read.add(key)
        return self._values.get(key, default)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def unread(self) -> list[str]:
        """Return the keys that nobody read."""
        return [key for key in self._values if key not in self._read]


class Keys:
    """The keys of a file's architecture, without its name before them."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata, self._prefix = metadata, f"{metadata.architecture}."

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; a float as it was before it was rounded to the file's 32 bits: 1e-05, not 9.99...e-06."""
        value = self._metadata.get(self._prefix + key, default)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def plain(self, key: str) -> Any:
        """Return the value of a key that has no architecture's name before it; KeyError without one."""
        if key not in self._metadata:
            raise KeyError(key)
        return self._metadata.get(key)

    def unread(self) -> list[str]:
        """Return the keys of the architecture that nobody read, with its name."""
        return [key for key in self._metadata.unread() if key.startswith(self._prefix)]


def read_header(file: Path) -> tuple[Metadata, dict[str, Place]]:
    """Read the header of a GGUF file, with the places of its tensors by name.

    Raises UsageError if the file cannot be read, is damaged, or of a version that is not 2 or 3.

    `gguf.GGUFReader` makes NumPy views of each string, which takes many seconds for a vocabulary.
    """
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            values, places = _Header(content).contents()
            return Metadata(values), places
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({told(error)}); give another GGUF file.") from error
    except ValueError as error:
        raise UsageError(
            f"{file} is not a complete GGUF file ({told(error)}); download it again, or give another one."
        ) from error


class _Header:
    """Reads a header from its beginning to its end; raises ValueError where it is damaged."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at = content, 0

    def contents(self) -> tuple[dict[str, Any], dict[str, Place]]:
        if self._bytes(4) != b"GGUF" or self._number(_U32) not in (2, 3):
            raise ValueError("it does not begin with GGUF and version 2 or 3, little-endian")
        tensors, keys = self._numbers(_U64, 2)
        values = {self._string(): self._value(self._number(_U32)) for _ in range(keys)}
        found = [self._tensor() for _ in range(tensors)]
        alignment = values.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its general.alignment is {alignment!r}, which is no power of two")
        begin = -(-self._at // alignment) * alignment
        places = {name: Place(shape, kind, begin + offset) for name, shape, kind, offset in found}
        if len(values) < keys or len(places) < tensors:
            raise ValueError("it has a key or a tensor twice")
        return values, places

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._number(_U32)
        shape = tuple(reversed(self._numbers(_U64, dimensions)))
        return name, shape, self._number(_U32), self._number(_U64)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            kind, count = self._number(_U32), self._number(_U64)
            return self._strings(count) if kind == _STRING else self._numbers(kind, count)
        return self._number(kind)

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        content, at, strings = self._content, self._at, []
        self._skip(at + 8 * count)  # the least that they take: a damaged count ends here
        for _ in range(count):  # up to a million: little work for each
            end = at + 8 + int.from_bytes(content[at : at + 8], "little")
            strings.append(content[at + 8 : end].decode())
            at = end
        self._skip(at)
        return strings

    def _number(self, kind: int) -> Any:
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise ValueError(f"it has a number, or a list, of the type {kind}, which is not read")
        dtype = np.dtype(_NUMBERS[kind])
        numbers: list[Any] = np.frombuffer(self._bytes(count * dtype.itemsize), dtype).tolist()
        return numbers

    def _bytes(self, count: int) -> bytes:
        begin = self._at
        self._skip(begin + count)
        return self._content[begin : self._at]

    def _skip(self, at: int) -> None:
        if at > len(self._content):
            raise ValueError(f"it ends at byte {len(self._content)}, inside its header")
        self._at = at
