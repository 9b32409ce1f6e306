"""Run the benchmarks' command line with `python -m bench`."""

import sys

from bench.cli import main

sys.exit(main())
