"""Support modules are imported by their bare names, here and in child processes."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE / "support", HERE.parent / "e2e" / "support"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
