"""Every benchmark of engines, run for real on a tiny shape: tokens come from the expected tier.

Speeds are never compared here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_hicache.benchmarks.arms import LABELS
from vllm_hicache.cli import main

pytestmark = pytest.mark.e2e

SAMPLE = Path(__file__).resolve().parent.parent / "data" / "trace-sample.jsonl"
TOKEN_BYTES = 2048
COMMON = [
    "--in-process",
    *("--block-size", "32", "--page-size", "32"),
    *("--arm-options", 'hicache={"skip_slow_loads": false}'),
]
TALKS = [
    *("--groups", "2", "--conversations", "6", "--turns", "3", "--concurrency", "2"),
    *("--system-tokens", "256", "--user-tokens", "48", "--answer-tokens", "16"),
    # Two turns of the longest, one block that vLLM keeps, and no more: nobody is preempted.
    *("--device-kv-bytes", str(30 * 32 * TOKEN_BYTES)),
]
RECORD = {"command", "date", "commit", "machine", "versions", "benchmark", "workload", "plans"}


@pytest.fixture(autouse=True)
def own_environment():
    """Benchmarks set variables of vLLM for good, which servers of later tests would inherit."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def _bench(name, *arguments, out):
    assert main(["bench", name, *arguments, "--out", str(out)]) == 0
    assert (out / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    record = json.loads((out / f"{name}.json").read_text())
    assert record.keys() >= {*RECORD, "summary", "results", "not_measured"}
    assert record["benchmark"] == name
    kept = [json.loads(path.read_text()) for path in (out / "engines").iterdir()]
    assert len(kept) == sum(map(len, record["results"].values()))
    return record


def _assert_vllm_and_clients_agree(record):
    """Both count the same cached tokens, and every arm had the same prompts."""
    lengths = []
    for passes in record["results"].values():
        for result in passes:
            answers = result["answers"]
            cached = sum(answer["cached_tokens"] for answer in answers)
            assert sum(result["cached"].values()) == cached
            lengths.append(sorted(answer["prompt_tokens"] for answer in answers))
    assert all(found == lengths[0] for found in lengths)


def test_conversations_come_back_from_host_and_without_us_are_computed(tmp_path, capsys):
    record = _bench("multiturn", *COMMON, *TALKS, "--vs", "none,lmcache", out=tmp_path)
    _assert_vllm_and_clients_agree(record)
    ours, alone = (record["summary"][arm] for arm in ("hicache", "none"))
    assert ours["answers"] == alone["answers"] == 12 * 3
    assert ours["output_tokens"] == 12 * 3 * 16
    assert ours["cached_tokens"]["host"] >= 5 * 32
    assert ours["cached_tokens"]["device"] > 0
    assert alone["cached_tokens"].keys() == {"device"}
    assert ours["shares"]["computed"] < alone["shares"]["computed"]
    assert "ratio" in alone
    assert record["not_measured"].keys() == {LABELS["lmcache"]}
    printed = capsys.readouterr().out
    assert "Not measured" in printed
    assert "host" in printed


def test_more_conversations_at_once_than_the_device_holds_come_back_from_host(tmp_path):
    """With the connector's defaults: neither waiting for blocks nor long steps of others may make
    it compute what host has."""
    crowd = ["--groups", "2", "--conversations", "6", "--turns", "4", "--concurrency", "12"]
    sizes = ["--system-tokens", "512", "--user-tokens", "128", "--answer-tokens", "16"]
    engine = ["--in-process", "--block-size", "32", "--page-size", "64"]
    record = _bench("multiturn", *engine, *crowd, *sizes, "--arms", "hicache", out=tmp_path)
    _assert_vllm_and_clients_agree(record)
    counted = record["results"]["hicache"][0]["counters"]
    found, served = (counted[f"vllm:hicache_{name}_tokens"] for name in ("found", "served"))
    assert found > 0.15 * record["summary"]["hicache"]["prompt_tokens"]
    assert served > 0.9 * found


def test_prompts_that_other_requests_pushed_out_are_restored_beside_a_wave(tmp_path):
    waves = ["--concurrency", "1,2", "--waves", "1", "--prompt-tokens", "64"]
    sizes = ["--answer-tokens", "24", "--seen", "2", "--seen-tokens", "256"]
    record = _bench("interference", *COMMON, *waves, *sizes, "--vs", "", out=tmp_path)
    found = {(line["concurrency"], line["load"]): line for line in record["summary"]}
    for concurrency in (1, 2):
        saving = found[concurrency, "saving alone"]
        assert saving["cached_tokens"] == {}
        restoring = found[concurrency, "restoring beside"]
        # All but the last block of each restored prompt, and from host alone.
        assert restoring["restored_prompts"] in (1, 2)
        assert restoring["cached_tokens"] == {"host": 224 * restoring["restored_prompts"]}


@pytest.mark.full
def test_waves_also_write_to_files_and_restore_from_them(tmp_path):
    waves = ["--concurrency", "2", "--waves", "2", "--prompt-tokens", "64"]
    sizes = ["--answer-tokens", "24", "--seen", "2", "--seen-tokens", "288"]
    record = _bench("interference", *COMMON, *waves, *sizes, out=tmp_path)
    found = {(line["load"], line["arm"]): line for line in record["summary"]}
    assert found.keys() == {
        ("saving alone", "hicache"),
        ("saving alone", "hicache+file"),
        ("saving alone", "none"),
        ("restoring beside", "hicache"),
        ("restoring beside", "hicache+file"),
    }
    assert all(line["waves"] == 2 and line["inter_token_p50_ratio"] > 0 for line in found.values())
    restored = found["restoring beside", "hicache+file"]
    assert restored["cached_tokens"].keys() == {"disk"}
    assert restored["cached_tokens"]["disk"] == 256 * restored["restored_prompts"] > 0
    assert "restoring beside of vLLM without a connector" in record["not_measured"]


@pytest.mark.full
def test_a_trace_hits_what_its_ids_share_and_no_more(tmp_path):
    trace = [str(SAMPLE), "--time-scale", "4", "--length-scale", "0.25", "--concurrency", "1"]
    sizes = ["--max-tokens", "530", "--device-kv-bytes", "1300kB"]
    record = _bench("trace", *COMMON, *trace, *sizes, out=tmp_path)
    _assert_vllm_and_clients_agree(record)
    workload, ours = record["workload"], record["summary"]["hicache"]
    assert ours["answers"] == workload["requests"] == 10
    assert record["not_measured"]["2 requests"] == "longer than --max-tokens 530"
    reused = sum(ours["cached_tokens"].values()) / ours["prompt_tokens"]
    assert 0.5 * workload["reusable_share"] < reused <= workload["reusable_share"]
    assert ours["cached_tokens"].keys() == {"device", "host"}
    late = [answer["late_s"] for answer in record["results"]["hicache"][0]["answers"]]
    assert min(late) >= 0


@pytest.mark.full
def test_passes_alternate_between_arms_in_engines_of_their_own_process(tmp_path, capsys):
    arguments = [*COMMON[1:], *TALKS, "--turns", "2", "--repeat", "2"]
    record = _bench("multiturn", *arguments, out=tmp_path)
    _assert_vllm_and_clients_agree(record)
    assert record["summary"]["hicache"]["passes"] == 2
    assert record["summary"]["none"]["answers"] == 2 * 12 * 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pass ")]
    labels = [LABELS["hicache"], LABELS["none"]]
    assert lines == [f"pass {number} of 2: {label}" for number in (1, 2) for label in labels]


@pytest.mark.full
def test_a_restore_is_measured_after_other_prompts_took_its_place(tmp_path):
    command = [sys.executable, "-P", "-m", "vllm_hicache.benchmarks.restore"]
    sizes = ["--lengths", "512", "--page-size", "64", "--repeat", "1", "--evict-by", "prompts"]
    run = subprocess.run(
        [*command, *sizes, "--vs", "none,lmcache", "--out", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    record = json.loads((tmp_path / "restore.json").read_text())
    found = {(result["connector"], result["tier"]): result for result in record["results"]}
    assert found.keys() == {
        *(("hicache", tier) for tier in ("cold", "device hit", "host restore", "file restore")),
        *(("none", tier) for tier in ("cold", "device hit")),
    }
    assert record["raw_gb_per_s"]["file read"] > 0
    assert found["hicache", "host restore"]["samples"][0]["cached"] == {"host": 480}
    assert found["hicache", "file restore"]["samples"][0]["cached"] == {"disk": 480}
    assert record["not_measured"].keys() == {LABELS["lmcache"]}
