"""`python -m fencekit.cli` is the `fencekit` command."""

import sys

from . import main

sys.exit(main())
