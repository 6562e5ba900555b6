"""`python -m flaxen`."""

import sys

from flaxen.cli import main

sys.exit(main())
