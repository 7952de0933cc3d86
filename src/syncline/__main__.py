"""`python -m syncline`: the command where it is not on the path."""

import sys

from syncline.cli.main import main

sys.exit(main())
