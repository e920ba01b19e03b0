"""`python -m foredraft.cli`: the `foredraft` command where its script is not on the path."""

import sys

from foredraft.cli import main

if __name__ == "__main__":
    sys.exit(main())
