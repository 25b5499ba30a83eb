"""`python -m torchtitan`, the same as the command `torchtitan`."""

import sys

from torchtitan.cli import main

sys.exit(main())
