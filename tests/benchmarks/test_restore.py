"""The restore benchmark without an engine: what it would run, what it accepts, what it writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_hicache.benchmarks import restore
from vllm_hicache.benchmarks.bench_report import write_plot
from vllm_hicache.benchmarks.command import parser_of
from vllm_hicache.benchmarks.restore_plan import plan_restore
from vllm_hicache.benchmarks.run_record import run_record
from vllm_hicache.cli import main
from vllm_hicache.config import HiCacheConfig

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "restore.py"


def _plan(*arguments, folder):
    options = parser_of("restore").parse_args(["--shape", "llama-8b", *arguments])
    restore.check_options(options)
    return plan_restore(options, options.arms[0], folder)


def _result(tier, ttft_s, **changed):
    result = {
        "connector": "hicache",
        "length": 8192,
        "tier": tier,
        "ttft_s": ttft_s,
        "cached_tokens": 8160,
        "gb_per_s": 2.5,
        "copy_gb_per_s": 0.0,
        "fetch_gb_per_s": 0.0,
        "wrong": [],
    }
    return {**result, **changed}


@pytest.mark.services
def test_the_script_and_the_command_have_one_help(capsys):
    run = subprocess.run(
        [sys.executable, "-P", SCRIPT, "--help"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0
    assert "hicache bench restore --shape llama-8b" in run.stdout
    with pytest.raises(SystemExit) as ended:
        main(["bench", "restore", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == run.stdout.split()


def test_a_dry_run_shows_every_arm_and_leaves_nothing(capsys):
    arguments = ["--shape", "llama-8b", "--lengths", "8192,65536", "--dry-run"]
    assert main(["bench", "restore", *arguments, "--vs", "native,simple,none"]) == 0
    hicache, native, simple, none = json.loads(capsys.readouterr().out)
    longest_bytes = 65536 * 131072  # 32 layers x 8 heads x 128 x (K and V) x 2 bytes
    assert hicache["connector_options"]["host_memory"] == 3 * longest_bytes
    assert hicache["connector_options"]["storage"]["capacity"] > 3 * longest_bytes
    assert native["connector"] == "OffloadingConnector"
    assert simple["connector"] == "SimpleCPUOffloadConnector"
    for peer in (native, simple):
        assert peer["connector_options"] == {"cpu_bytes_to_use": 3 * longest_bytes}
    assert none["connector"] == ""
    assert hicache["engine"] == native["engine"] == simple["engine"] == none["engine"]
    assert hicache["engine"]["load_format"] == "dummy"
    assert not Path(hicache["engine"]["model"]).exists()


def test_host_memory_also_holds_the_prompts_that_evict_others(tmp_path):
    plan = _plan("--evict-by", "prompts", "--lengths", "8192", folder=tmp_path)
    longest_bytes = 8192 * 131072
    assert plan.evicts_by_prompts
    assert plan.engine["kv_cache_memory_bytes"] < 3 * longest_bytes
    assert plan.connector_options["host_memory"] == 5 * longest_bytes
    assert plan.connector_options["storage"]["capacity"] > 5 * longest_bytes


def test_more_options_reach_the_connector(tmp_path):
    plan = _plan("--hicache-options", '{"eviction": "slru"}', folder=tmp_path)
    assert plan.connector_options["eviction"] == "slru"


def test_connector_options_of_the_plan_are_accepted_by_the_connector(tmp_path):
    for mode, expected_ms in (("auto", 3.0), ("sync", 600_000.0), ("async", 0.0)):
        plan = _plan("--load-mode", mode, folder=tmp_path)
        config = HiCacheConfig.parse(plan.connector_options, env={})
        assert config.sync_load_max_ms == expected_ms
        assert config.load_mode == "async"
        assert config.fixed_weights
        # A step waits for a load only where vLLM has one batch in flight.
        assert (plan.engine.get("async_scheduling") is False) == (mode == "sync")
    layerwise = _plan("--load-mode", "layerwise", folder=tmp_path).connector_options
    assert HiCacheConfig.parse(layerwise, env={}).load_mode == "layerwise"
    plan = _plan("--storage", "none", folder=tmp_path)
    assert HiCacheConfig.parse(plan.connector_options, env={}).storage is None


def test_an_unknown_arm_is_refused(capsys):
    assert main(["bench", "restore", "--connector", "hicache,sglang", "--dry-run"]) == 2
    assert "native,simple,lmcache,none" in capsys.readouterr().err


def test_a_hit_from_another_tier_or_a_short_one_is_wrong(tmp_path):
    plan = _plan("--page-size", "256", "--block-size", "32", folder=tmp_path)
    assert plan.expected(8192, "host restore") == 8160
    assert plan.expected(8200, "device hit") == 8192
    assert plan.expected(8200, "host restore") == 8192
    assert plan.is_expected({"host": 8160}, 8192, "host restore")
    assert not plan.is_expected({"host": 7904}, 8192, "host restore")
    assert not plan.is_expected({"disk": 8160}, 8192, "host restore")
    assert not plan.is_expected({"host": 8160, "disk": 32}, 8192, "host restore")
    assert plan.is_expected({}, 8192, "cold")
    assert not plan.is_expected({"device": 32}, 8192, "cold")


def test_vllms_own_connector_may_keep_up_to_a_page_less(tmp_path):
    plan = _plan("--connector", "native", folder=tmp_path)
    assert plan.tiers == ("cold", "device hit", "host restore")
    assert plan.is_expected({"host": 8000}, 8192, "host restore")
    assert not plan.is_expected({"host": 7000}, 8192, "host restore")
    last = plan.block_size
    assert plan.is_expected({"device": 8192 - last, "host": last}, 8192, "device hit")
    assert not plan.is_expected({"device": 8192 - 2 * last, "host": 2 * last}, 8192, "device hit")


def test_the_table_tells_speed_up_and_wrong_hits():
    results = [_result("cold", 2.0), _result("file restore", 0.5, wrong=[{"host": 8160}])]
    lines = restore.report(results).splitlines()
    assert lines[2].split()[-4:] == ["2,000.0", "1.0x", "8,160", "ok"]
    assert lines[3].split()[-5:] == ["500.0", "4.0x", "8,160", "2.50", "WRONG"]


@pytest.mark.services
def test_the_plot_is_a_picture(tmp_path):
    results = [_result("cold", 2.0), _result("host restore", 0.5), _result("file restore", 0.7)]
    record = {**run_record(), "results": results}
    write_plot(tmp_path / "out" / "restore.png", record, restore.plot)
    assert (tmp_path / "out" / "restore.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_there_is_a_message_and_no_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "vllm_hicache.benchmarks.restore_plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_plot(tmp_path / "restore.png", {}, restore.plot)
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "restore.png").exists()
