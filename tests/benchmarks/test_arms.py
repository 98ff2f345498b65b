"""Arms and engines of a comparison: equal but for the connector, refused with a reason."""

import json
import sys

import pytest

from vllm_hicache.benchmarks import arms
from vllm_hicache.benchmarks.arm_runs import Task, run_arms
from vllm_hicache.benchmarks.arms import connector_options, parse_arms, parse_more_options, why_not
from vllm_hicache.benchmarks.command import parser_of, run_benchmark
from vllm_hicache.benchmarks.common_options import Sizes, chosen_arms, plan_engines
from vllm_hicache.benchmarks.engine_plan import EnginePlan
from vllm_hicache.config import HiCacheConfig
from vllm_hicache.errors import ConfigError

SIZES = Sizes(longest=1000, distinct=100_000, concurrency=4)
TOKEN_BYTES = 2048


def _plans(folder, *arguments, sizes=SIZES):
    options = parser_of("multiturn").parse_args(arguments)
    return {plan.arm: plan for plan in plan_engines(options, sizes, folder)}


def test_ours_is_always_measured_and_files_when_there_is_a_folder():
    parser = parser_of("multiturn")
    assert chosen_arms(parser.parse_args([])) == ("hicache", "none")
    named = parser.parse_args(["--vs", "native,none", "--storage", "/disk"])
    assert chosen_arms(named) == ("hicache", "native", "none", "hicache+file")
    assert chosen_arms(parser.parse_args(["--vs", ""])) == ("hicache",)
    assert chosen_arms(parser.parse_args(["--arms", "native,hicache"])) == ("native", "hicache")


@pytest.mark.parametrize("text", ["sglang", "none,none", "", ",", "hicache none"])
def test_unknown_or_repeated_arms_are_refused(text):
    with pytest.raises(ConfigError, match="native,simple,lmcache,none, each once"):
        parse_arms(text)


def test_engines_differ_in_nothing_but_the_connector(tmp_path):
    plans = _plans(tmp_path, "--vs", "native,simple,lmcache,none,hicache+file")
    assert len(plans) == 6
    assert len({json.dumps(plan.engine) for plan in plans.values()}) == 1
    assert {plan.host_bytes for arm, plan in plans.items() if arm != "none"} == {
        100_000 * TOKEN_BYTES
    }
    assert plans["hicache"].connector_options["host_memory"] == 100_000 * TOKEN_BYTES
    for arm in ("native", "simple"):
        assert plans[arm].connector_options == {"cpu_bytes_to_use": 100_000 * TOKEN_BYTES}
    lmcache = plans["lmcache"].connector_options
    assert lmcache["lmcache.mp.port"] == 6555
    assert lmcache["lmcache.mp.save_decode_cache"]  # answers, too, as the others
    assert plans["none"].connector == ""
    assert plans["hicache"].storage is None
    assert plans["hicache+file"].storage == tmp_path / "pages"


def test_the_default_device_holds_a_quarter_and_the_longest_request(tmp_path):
    engine = _plans(tmp_path)["hicache"].engine
    assert engine["kv_cache_memory_bytes"] == 25_000 * TOKEN_BYTES
    short = _plans(tmp_path, sizes=Sizes(1000, 2000, 1))["hicache"].engine
    assert short["kv_cache_memory_bytes"] >= 1000 * TOKEN_BYTES
    with pytest.raises(ConfigError, match="--device-kv-bytes 2,097,152 is too small"):
        _plans(tmp_path, "--device-kv-bytes", "2MiB")


def test_workers_share_host_memory_and_the_device_s(tmp_path):
    plans = _plans(tmp_path, "--tensor-parallel-size", "2", "--vs", "native")
    assert plans["hicache"].connector_options["host_memory"] == 50_000 * TOKEN_BYTES
    assert plans["native"].connector_options["cpu_bytes_to_use"] == 100_000 * TOKEN_BYTES
    assert plans["native"].engine["kv_cache_memory_bytes"] == 12_500 * TOKEN_BYTES


def test_the_connector_accepts_the_options_of_its_arms(tmp_path):
    plans = _plans(tmp_path, "--vs", "hicache+file", "--storage", str(tmp_path / "s"))
    config = HiCacheConfig.parse(plans["hicache+file"].connector_options, env={})
    assert config.storage.url == f"file://{tmp_path / 's'}"
    assert config.fixed_weights
    assert HiCacheConfig.parse(plans["hicache"].connector_options, env={}).storage is None


def test_more_options_of_ours_go_to_both_of_its_arms():
    more = parse_more_options(
        ['hicache={"eviction": "lru"}', 'hicache={"page_size": 64}', 'native={"x": 1}']
    )
    sizes = arms.ConnectorSizes(1 << 20, 256, None, more_options=more)
    for arm in ("hicache", "hicache+file"):
        options = connector_options(arm, sizes)
        assert (options["page_size"], options["eviction"]) == (64, "lru")
    assert connector_options("native", sizes)["x"] == 1


@pytest.mark.parametrize("pair", ["hicache", "hicache={", "hicache=[]", "who={}", "={}"])
def test_bad_options_of_arms_are_refused(pair):
    with pytest.raises(ConfigError, match="--arm-options"):
        parse_more_options([pair])


def test_a_plan_survives_its_way_to_the_engine_s_process(tmp_path):
    for plan in _plans(tmp_path, "--vs", "none,hicache+file").values():
        assert EnginePlan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


def test_peers_that_need_a_gpu_are_left_out_without_one(monkeypatch):
    monkeypatch.setattr(arms, "has_gpu", lambda: False)
    assert "CUDA" in why_not("native")
    assert "CUDA" in why_not("simple")
    assert why_not("hicache") == why_not("none") == ""
    monkeypatch.setattr(arms, "has_gpu", lambda: True)
    assert why_not("native") == ""


@pytest.mark.services
def test_lmcache_is_left_out_where_it_does_not_load():
    assert "--lmcache-python" in why_not("lmcache")
    assert "cannot be tried" in why_not("lmcache", "/no/such/python")
    reason = why_not("lmcache", f"{sys.prefix}/bin/python3")
    assert "does not load" in reason
    assert "No module named 'lmcache'" in reason


def test_what_cannot_run_is_said_and_the_rest_is_not_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "has_gpu", lambda: False)
    plans = _plans(tmp_path, "--vs", "native,lmcache", "--in-process")
    peers = [plans["native"], plans["lmcache"]]
    outcome = run_arms(peers, Task("multiturn", {}), tmp_path / "work")
    assert outcome.results == {}
    assert not outcome.has_failed
    assert list(outcome.not_measured) == ["vLLM's OffloadingConnector", "LMCache in server mode"]


@pytest.mark.services
def test_an_arm_that_fails_is_said_with_the_end_of_its_log(tmp_path, capsys):
    plan = _plans(tmp_path, "--vs", "")["hicache"]
    outcome = run_arms([plan], Task("no such workload", {}, repeat=2), tmp_path / "work")
    assert outcome.has_failed
    assert outcome.results == {}
    assert "no such workload" in outcome.not_measured["vllm-hicache"]
    assert "pass 2" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("multiturn", ["--vs", "sglang"], "one or several of"),
        ("multiturn", ["--turns", "0"], "--turns must be 1 or more"),
        ("multiturn", ["--host-memory", "8"], "--host-memory 8"),
        ("multiturn", ["--model", "x", "--shape", "tiny"], "exclude one another"),
        ("multiturn", ["--turns", "1000"], "the model takes"),
        ("interference", ["--concurrency", "1,x"], "--concurrency takes numbers"),
        ("interference", ["--concurrency", "0"], "--concurrency must be 1 or more"),
        ("trace", ["no-such-file"], "No such file"),
        ("restore", ["--connector", "sglang"], "one or several of"),
        ("restore", ["--lengths", "x"], "--lengths takes numbers"),
        ("storage", ["redis", "--drop-page-cache"], "is for files"),
    ],
)
def test_what_makes_no_sense_is_refused_with_status_2(name, arguments, message, capsys):
    assert run_benchmark(name, [*arguments, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_shows_the_workload_and_why_an_engine_would_not_run(capsys, monkeypatch):
    monkeypatch.setattr(arms, "has_gpu", lambda: False)
    assert run_benchmark("multiturn", ["--shape", "llama-8b", "--vs", "native", "--dry-run"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["workload"]["groups"] == 4
    hicache, native = shown["engines"]
    assert hicache["engine"]["kv_cache_memory_bytes"] == 16 << 30
    assert hicache["connector_options"]["host_memory"] == 64 << 30
    assert hicache["not_here"] == ""
    assert "CUDA" in native["not_here"]
