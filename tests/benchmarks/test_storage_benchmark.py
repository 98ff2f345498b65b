"""The benchmark of storage services runs; backends here are no slower than their raw clients."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_hicache.benchmarks import storage
from vllm_hicache.cli import main

pytestmark = pytest.mark.services

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def test_a_small_run_has_a_line_for_every_way(tmp_path):
    options = ("--object-kib", "64", "--total-mib", "1", "--rounds", "1")
    command = [sys.executable, "-P", BENCHMARKS / "storage.py", "redis", *options]
    record = tmp_path / "record.json"
    run = subprocess.run([*command, "--json", record], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = json.loads(record.read_text())["lines"]
    ways = {"redis-py + hiredis", "backend", "backend, checked"}
    assert {(line["way"], line["direction"]) for line in lines} == {
        (way, direction) for way in ways for direction in ("read", "write")
    }
    assert all(line["mib_per_s"] > 0 and line["client_ms_per_mib"] > 0 for line in lines)
    assert "write backend, checked" in run.stdout


@pytest.mark.parametrize("more", [(), ("--drop-page-cache",)])
def test_files_are_compared_with_plain_threads(tmp_path, capsys, more):
    options = ("--object-kib", "64", "--total-mib", "1", "--rounds", "1", "--url", str(tmp_path))
    out = tmp_path / "out"
    assert main(["bench", "storage", "file", *options, *more, "--out", str(out)]) == 0
    record = json.loads((out / "storage-file.json").read_text())
    found = {(line["way"], line["direction"]) for line in record["lines"]}
    ways = {"plain threads", "backend", "backend, checked"}
    assert found == {(way, direction) for way in ways for direction in ("read", "write")}
    assert all(line["of_raw"] > 0 for line in record["lines"])
    assert record["not_measured"].keys() == {"redis", "s3"}
    assert (out / "storage-file.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "read backend, checked" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.full
def test_redis_backend_reaches_nine_tenths_of_the_raw_client():
    options = storage.parse_options(["redis", "--total-mib", "64"])
    lines = asyncio.run(storage.measure(options))
    of_raw = {
        (line["object_kib"], line["direction"]): line["of_raw"]
        for line in lines
        if line["way"] == "backend"
    }
    assert len(of_raw) == 4
    assert min(of_raw.values()) >= 0.9, of_raw


@pytest.mark.full
def test_s3_backend_reaches_nine_tenths_of_the_raw_client():
    options = storage.parse_options(["s3", "--total-mib", "32", "--batch", "1"])
    lines = asyncio.run(storage.measure(options))
    of_raw = {
        (line["object_kib"], line["direction"]): line["of_raw"]
        for line in lines
        if line["way"] == "backend"
    }
    assert len(of_raw) == 4
    assert min(of_raw.values()) >= 0.9, of_raw
