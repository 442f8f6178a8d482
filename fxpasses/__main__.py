"""`python -m fxpasses`, the same as the command `fxpasses`."""

import sys

from fxpasses.inspect.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
