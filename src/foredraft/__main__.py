"""The `foredraft` command as a process: of its script, and of `python -m foredraft`."""

import atexit
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

_COLLECTED_AFTER = 10_000
"""New objects, after which Python looks for garbage. Its own 700 looks 1,400 times before SmolLM2's first token, which
came after 9.3 s; with 10,000, 50,000 and 200,000 after 8.0, 8.2 and 8.4 s (medians of five)."""


def main() -> int:
    """Run the command and return the exit status; an interrupt during imports prints a message, not a traceback."""
    status = 1

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the command has told what could not be written
                stream.flush()
        os._exit(status)

    def drop(lost: "sys.UnraisableHookArgs") -> None:
        nonlocal status
        if isinstance(lost.exc_value, KeyboardInterrupt):  # numba's callbacks lose it, and then fail in other words
            sys.stderr.write("Interrupted.\n")
            status = 130
            leave()
        sys.__unraisablehook__(lost)

    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # until the process ends
    sys.unraisablehook = drop
    gc.set_threshold(_COLLECTED_AFTER)  # saves one second of nine until the first token
    atexit.register(leave)  # called last, and saves the second or two that taking torch's modules apart would take
    try:
        from foredraft.cli import main as run

        status = run()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        status = 130
    return status


if __name__ == "__main__":
    sys.exit(main())
