"""`python -m tracewire`: the command line."""

import sys

from .cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
