"""`python -m foredraft`: the `foredraft` command where its script is not on the path."""

import sys


def main() -> int:
    """Run the command and return the exit status; an interrupt is a sentence even while modules are imported."""
    try:
        from foredraft.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
