"""README says of models what engine tests saw, and nothing else."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("model_table.py")
_SPEC = importlib.util.spec_from_file_location("model_table", SCRIPT)
model_table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(model_table)
table, with_table, BEGIN, END = (
    model_table.table,
    model_table.with_table,
    model_table.BEGIN,
    model_table.END,
)
README = model_table.README.read_text()
KEPT = json.loads(model_table.KEPT.read_text())
SEEN = {
    "family": "Gemma 3",
    "drafter": "",
    "runner": "V1",
    "tp": 1,
    "pp": 1,
    "tiers": ["host", "file"],
    "test": "tests/e2e/test_a.py::test_one",
}


def _row(made: str, name: str) -> list[str]:
    (line,) = [line for line in made.splitlines() if line.startswith(f"| {name} |")]
    return line.strip("| ").split(" | ")[2:]


def test_readme_shows_the_results_that_are_kept():
    assert KEPT, "no result is kept"
    assert with_table(README, table(KEPT)) == README


def test_every_kept_result_names_a_test_that_there_is():
    for row in KEPT:
        path, _, name = row["test"].partition("::")
        text = (model_table.ROOT / path).read_text()
        assert f"def {name.partition('[')[0]}(" in text


def test_nothing_is_said_of_what_was_not_run():
    for name in model_table.FAMILIES:
        assert _row(table([]), name) == ["-"] * 6


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ["yes", "yes", "-", "-", "-", "-"]),
        ({"tiers": ["file"]}, ["-", "yes", "-", "-", "-", "-"]),
        ({"tp": 2}, ["-", "-", "yes", "-", "-", "-"]),
        ({"pp": 2}, ["-", "-", "-", "yes", "-", "-"]),
        ({"tp": 2, "pp": 2}, ["-", "-", "-", "-", "-", "-"]),
        ({"tp": 2, "tiers": ["file"]}, ["-", "-", "file", "-", "-", "-"]),
        ({"runner": "V2"}, ["-", "-", "-", "-", "yes", "-"]),
        ({"drafter": "eagle"}, ["-", "-", "-", "-", "-", "EAGLE"]),
    ],
)
def test_a_result_fills_the_cells_of_its_own_engine_alone(change, expected):
    made = table([SEEN | change])
    assert _row(made, "Gemma 3") == expected
    assert _row(made, "GPT-OSS") == ["-"] * 6


def test_a_drafter_has_a_row_with_its_targets():
    rows = [SEEN | {"drafter": "eagle"}, SEEN | {"drafter": "eagle", "family": "GPT-OSS", "tp": 2}]
    made = table(rows)
    assert _row(made, "EAGLE") == ["yes", "yes", "yes", "-", "-", "for Gemma 3; GPT-OSS"]
    assert _row(made, "MTP") == ["-"] * 6


def test_a_family_without_a_row_is_an_error_and_not_left_out(tmp_path):
    noted = tmp_path / "models.jsonl"
    noted.write_text(json.dumps(SEEN | {"family": "Gemma 4"}) + "\n")
    with pytest.raises(ValueError, match="Gemma 4"):
        model_table.read_notes(noted)


def test_a_readme_without_marks_is_an_error():
    assert with_table(f"a\n{BEGIN}old\n{END}b\n", "new\n") == f"a\n{BEGIN}new\n{END}b\n"
    with pytest.raises(ValueError, match="must be in README"):
        with_table(f"a\n{BEGIN}old\n", "new\n")


@pytest.mark.services
def test_the_script_makes_both_files_from_the_notes(tmp_path):
    tests, docs = tmp_path / "tests", tmp_path / "docs"
    for folder in (tests, docs):
        folder.mkdir()
    script = tests / SCRIPT.name
    script.write_bytes(SCRIPT.read_bytes())
    (tmp_path / "README.md").write_text(f"a\n{BEGIN}{END}")
    noted = tmp_path / "models.jsonl"
    noted.write_text((json.dumps(SEEN) + "\n") * 2)
    subprocess.run([sys.executable, script, noted], check=True)
    assert json.loads((docs / "model-results.json").read_text()) == [SEEN]
    assert (tmp_path / "README.md").read_text() == f"a\n{BEGIN}{table([SEEN])}{END}"
