"""`python -m slime <command>`: same as `slime <command>`."""

from __future__ import annotations

import sys

from slime.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
