"""`python -m foredraft.cli`: the same as `python -m foredraft`."""

import sys

from foredraft.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
