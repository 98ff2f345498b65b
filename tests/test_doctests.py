"""Run the examples in docstrings, each module by its import name (never as ``kernels.x``)."""

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("connectors", "kernels", "storage_backends", "benchmarks")


def _modules_with_examples() -> list[str]:
    found = []
    for folder in ("vllm_hicache", *MAPPED):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>> " in path.read_text():
                parts = path.relative_to(ROOT).with_suffix("").parts
                parts = ("vllm_hicache", *parts) if folder in MAPPED else parts
                found.append(".".join(parts).removesuffix(".__init__"))
    return found


@pytest.mark.parametrize("module", _modules_with_examples())
def test_examples_in_docstrings_are_true(module):
    result = doctest.testmod(importlib.import_module(module), raise_on_error=False)
    assert result.attempted > 0
    assert result.failed == 0


def test_there_are_examples_to_run():
    assert _modules_with_examples()


def test_a_false_example_is_seen(tmp_path):
    path = tmp_path / "false_example.py"
    path.write_text('"""A sum.\n\n>>> 1 + 1\n3\n"""\n')
    specification = importlib.util.spec_from_file_location("false_example", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert doctest.testmod(module, report=False).failed == 1
