"""The built packages hold every module under its import name, and no generic name."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("connectors", "kernels", "storage_backends", "benchmarks")
PARTS = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "DESIGN.md", "vllm_hicache")
BUILD = (
    "import sys; from setuptools import build_meta as build; out = sys.argv[1]; "
    "build.build_sdist(out); build.build_wheel(out)"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build an sdist and a wheel of a copy of the checkout; return the paths of both."""
    copy = tmp_path_factory.mktemp("checkout")
    for part in (*PARTS, *MAPPED, "tests", "examples"):
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / part)
    out = tmp_path_factory.mktemp("dist")
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", "-c", BUILD, out]
    run = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def test_the_wheel_holds_every_module_and_nothing_else(built):
    expected = {"vllm_hicache/py.typed"}
    for path in ROOT.glob("vllm_hicache/**/*.py"):
        expected.add(path.relative_to(ROOT).as_posix())
    for folder in MAPPED:
        for path in (ROOT / folder).rglob("*.py"):
            expected.add(f"vllm_hicache/{path.relative_to(ROOT).as_posix()}")
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected


def test_the_sdist_holds_the_tests_with_all_their_folders(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert "tests/conftest.py" in names
    assert "examples/quickstart.sh" in names
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders
    assert all(any(n.startswith(f"tests/{folder}/test_") for n in names) for folder in folders)
