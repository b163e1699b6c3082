"""`python -m graphc`, the same as the command `graphc`."""

import sys
from pathlib import Path

# `passes`, `cache` and `cli` are common names: the ones beside this package must win
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cli.main import main

if __name__ == "__main__":
    sys.exit(main())
