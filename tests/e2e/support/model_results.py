"""Notes which models were restored, from where, by which engine: one JSON line each, of which
``tests/model_table.py`` makes the table in README.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[3] / ".cache" / "results" / "models.jsonl"
BOTH = ("host", "file")


def note_restored(
    family: str,
    tiers: Sequence[str] = BOTH,
    *,
    tp: int = 1,
    pp: int = 1,
    runner: str = "V1",
    drafter: str = "",
) -> None:
    """The last call of a test that has seen this: so many tokens as expected came from each of
    ``tiers``, and the answers were right."""
    test = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
    row = {
        "family": family,
        "drafter": drafter,
        "runner": runner,
        "tp": tp,
        "pp": pp,
        "tiers": list(tiers),
        "test": test,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as results:
        results.write(json.dumps(row) + "\n")
