"""Run the command line with `python -m lightck.cli`."""

import sys

from lightck.cli.main import main

sys.exit(main())
