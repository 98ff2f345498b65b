"""Support modules of these tests are imported by their bare names, here and in child processes.

So are those that start storage services, which the tests of the backends share.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
for SUPPORT in (TESTS / "storage_backends" / "support", TESTS / "e2e" / "support"):
    if str(SUPPORT) not in sys.path:
        sys.path.insert(0, str(SUPPORT))
