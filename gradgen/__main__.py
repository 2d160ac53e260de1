"""`python -m gradgen`."""

import sys

from gradgen.cli import main

sys.exit(main())
