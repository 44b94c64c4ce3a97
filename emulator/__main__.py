"""`python -m emulator` is the same as the console script."""

import sys

from emulator.cli import main

sys.exit(main())
