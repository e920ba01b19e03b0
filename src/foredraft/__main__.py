"""`python -m foredraft`: the `foredraft` command, for when its script is not on the path."""

import sys


def main() -> int:
    """Run the command and return the exit status; an interrupt during imports prints a message, not a traceback."""
    try:
        from foredraft.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
