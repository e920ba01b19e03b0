"""Compiles in another process, at low priority, while generation continues uncompiled.

Uses the process and the record that it writes. Does not depend on what is compiled, or how.
"""

import subprocess
import sys
import warnings
import weakref
from typing import Any

import torch

from foredraft.cache_folder import cache_folder
from foredraft.errors import ForedraftWarning
from foredraft.model.compiled.package import RECORD, compiled_folder, read_record
from foredraft.model.rounding import dtype_name


class Compilation:
    """Compiles a model on the CPU, loaded by its name, until all is compiled or this process ends.

    Raises StoreError if the cache folder is not writable.
    """

    def __init__(self, name: str, model: Any) -> None:
        self._folder = compiled_folder(model, cache_folder())
        self._seen = self._stamp()
        command = [  # the loaded folder, if there is one, as of a GGUF file
            sys.executable, "-m", "foredraft", "compile", model.name_or_path or name, "--dtype", dtype_name(model),
            "--threads", str(torch.get_num_threads()), "--background",
        ]  # fmt: skip
        self._process = subprocess.Popen(  # noqa: S603  # our own command
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def running(self) -> bool:
        """Whether it still compiles."""
        return self._process.poll() is None

    def has_news(self) -> bool:
        """Return whether a package was added since the last call; warns once if the process failed."""
        if self._end.alive and not self.running:
            self._end.detach()
            _, said = self._process.communicate()
            if status := self._process.returncode:
                last = said.strip().splitlines()[-1] if said.strip() else f"The compiler ended with status {status}."
                warnings.warn(last, ForedraftWarning, stacklevel=2)
            elif (record := read_record(self._folder)) is not None and record.warning:
                warnings.warn(record.warning, ForedraftWarning, stacklevel=2)
        stamp = self._stamp()
        news, self._seen = stamp != self._seen, stamp
        return news

    def _stamp(self) -> int:
        try:
            return (self._folder / RECORD).stat().st_mtime_ns
        except OSError:
            return 0


def _end(process: "subprocess.Popen[str]") -> None:
    """Stop a process that is still running, and close its pipe."""
    process.terminate()
    process.communicate()
