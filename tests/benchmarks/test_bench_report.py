"""What comes out of results: figures, ratios, tables, records and plots. No engine runs."""

import json

import numpy as np
import pytest

from vllm_hicache.benchmarks import interference, multiturn, run_record
from vllm_hicache.benchmarks.answer_statistics import summarise, summary_tables, without_gaps
from vllm_hicache.benchmarks.answers import Answer, cached_by_source
from vllm_hicache.benchmarks.arm_runs import Outcome
from vllm_hicache.benchmarks.bench_report import publish, tier_shares
from vllm_hicache.benchmarks.interference import summarise_waves, wave_table
from vllm_hicache.benchmarks.wave_clients import steady_gaps_s
from vllm_hicache.benchmarks.waves import QUIET, RESTORING

MACHINE = {"cpu": "a CPU", "cores": 2, "gpu": "a GPU", "load_average": 0.5}


def _pass(slowness, num_answers=12, cached=None):
    random = np.random.default_rng(0)
    answers = [
        {
            "conversation": i % 4,
            "turn": i // 4,
            "prompt_tokens": 100,
            "ttft_s": slowness * (1 + random.random()),
            "end_s": slowness * (i + 1),
            "gaps_s": [0.01 * slowness] * 9,
        }
        for i in range(num_answers)
    ]
    wall_s = slowness * num_answers
    return {"machine": MACHINE, "wall_s": wall_s, "cached": cached or {}, "answers": answers}


def _summary(results):
    return summarise(results, "conversation", seed=0)


def test_figures_are_those_of_all_answers():
    figures = _summary({"hicache": [_pass(1.0, cached={"device": 300, "host": 600})]})["hicache"]
    times = [answer["ttft_s"] for answer in _pass(1.0)["answers"]]
    assert figures["ttft_mean_s"]["value"] == pytest.approx(np.mean(times))
    assert figures["ttft_p99_s"]["value"] == pytest.approx(np.percentile(times, 99))
    assert figures["inter_token_p50_s"]["value"] == pytest.approx(0.01)
    assert figures["output_tokens_per_s"]["value"] == pytest.approx(120 / 12)
    assert figures["shares"] == {"device": 0.25, "host": 0.5, "computed": 0.25}
    assert figures["ttft_mean_s"]["low"] < np.mean(times) < figures["ttft_mean_s"]["high"]


def test_arms_are_told_as_ratios_over_ours_paired_by_conversation():
    summary = _summary({"none": [_pass(2.0)], "hicache": [_pass(1.0)]})
    ratio = summary["none"]["ratio"]
    assert ratio["ttft_mean"]["value"] == pytest.approx(2.0)
    assert ratio["ttft_mean"]["high"] - ratio["ttft_mean"]["low"] < 1e-9
    assert ratio["output_tokens_per_s"]["value"] == pytest.approx(0.5)
    assert "ratio" not in summary["hicache"]


def test_passes_of_an_arm_are_taken_together():
    figures = _summary({"hicache": [_pass(1.0, cached={"host": 120}), _pass(3.0)]})["hicache"]
    assert figures["passes"] == 2
    assert figures["answers"] == 24
    assert figures["output_tokens_per_s"]["value"] == pytest.approx(240 / 48)
    assert figures["shares"]["host"] == pytest.approx(0.05)


def test_answers_of_one_token_have_no_gaps():
    result = _pass(1.0)
    for answer in result["answers"]:
        answer["gaps_s"] = []
    summary = _summary({"hicache": [result]})
    assert "inter_token_mean_s" not in summary["hicache"]
    assert " - " in summary_tables(summary)[0]
    assert without_gaps({"hicache": [result]})["hicache"][0]["answers"][0]["mean_gap_s"] is None


@pytest.mark.services
def test_a_record_has_everything_and_a_plot(tmp_path, capsys):
    results = {"hicache": [_pass(1.0, cached={"host": 600})], "none": [_pass(2.0)]}
    outcome = Outcome(results, {"LMCache in server mode": "it is not installed"})
    summary = _summary(results)
    findings = {"summary": summary, "results": without_gaps(results)}
    tables = summary_tables(summary)
    publish("multiturn", outcome, findings, tables, tmp_path / "out", multiturn.plot)
    record = json.loads((tmp_path / "out" / "multiturn.json").read_text())
    assert record["machine"] == MACHINE
    assert record["benchmark"] == "multiturn"
    assert record["not_measured"] == {"LMCache in server mode": "it is not installed"}
    assert {"command", "commit", "date", "versions", "summary", "results"} <= record.keys()
    assert (tmp_path / "out" / "multiturn.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    printed = capsys.readouterr().out
    assert "a GPU" in printed
    assert "LMCache in server mode: it is not installed" in printed


def test_nothing_left_out_is_said(capsys):
    publish("trace", Outcome(), {}, [], None, multiturn.plot)
    assert "Not measured: nothing was left out." in capsys.readouterr().out


def test_shares_add_up_to_one():
    assert tier_shares({"device": 1, "disk": 2}, 4) == {
        "device": 0.25,
        "disk": 0.5,
        "computed": 0.25,
    }


def test_counters_are_told_by_source_and_only_where_they_grew():
    name = "vllm:prompt_tokens_cached_by_source"
    before = {f"{name}/host": 5.0, f"{name}/disk": 7.0, "vllm:other/host": 1.0}
    after = {**before, f"{name}/host": 9.0, f"{name}/device": 2.0, "vllm:other/host": 8.0}
    assert cached_by_source(before, after) == {"host": 4, "device": 2}


def _wave(gap_s, concurrency=2, load=QUIET, **changed):
    wave = {
        "load": load,
        "concurrency": concurrency,
        "wall_s": 10 * gap_s,
        "output_tokens": 20,
        "gaps_s": [gap_s] * 18,
        "restored_prompts": 0,
        "cached": {},
    }
    return {**wave, **changed}


def _waves_outcome():
    restoring = _wave(0.13, load=RESTORING, restored_prompts=3, cached={"host": 768})
    return Outcome(
        {
            "hicache": [{"machine": MACHINE, "waves": [_wave(0.101), restoring, _wave(0.2, 8)]}],
            "none": [{"machine": MACHINE, "waves": [_wave(0.1), _wave(0.19, 8)]}] * 2,
        }
    )


def test_waves_are_compared_with_an_engine_alone_at_the_same_concurrency():
    found = {
        (line["concurrency"], line["load"], line["arm"]): line
        for line in summarise_waves(_waves_outcome())
    }
    assert len(found) == 5
    assert found[2, QUIET, "none"]["inter_token_p50_ratio"] == 1.0
    assert found[2, QUIET, "none"]["waves"] == 2
    assert found[2, QUIET, "hicache"]["inter_token_p50_ratio"] == pytest.approx(1.01)
    assert found[2, QUIET, "hicache"]["output_ratio"] == pytest.approx(1 / 1.01)
    assert found[2, RESTORING, "hicache"]["inter_token_p50_ratio"] == pytest.approx(1.3)
    assert found[8, QUIET, "hicache"]["inter_token_p50_ratio"] == pytest.approx(0.2 / 0.19)


def test_waves_without_a_baseline_are_told_without_ratios():
    outcome = _waves_outcome()
    del outcome.results["none"]
    summary = summarise_waves(outcome)
    assert all("inter_token_p50_ratio" not in line for line in summary)
    assert "host 768" in wave_table(summary)


@pytest.mark.services
def test_the_plot_of_waves_is_a_picture(tmp_path):
    record = {**run_record.run_record(), "summary": summarise_waves(_waves_outcome())}
    interference.plot(tmp_path / "waves.png", record)
    assert (tmp_path / "waves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_only_gaps_while_all_requests_decode_count():
    first = Answer(0.0, (1.0, 2.0, 3.0, 4.0), (1, 1, 1, 1), (1, 2, 3, 4), 0)
    late = Answer(0.0, (2.5, 3.5, 5.5), (1, 1, 2), (1, 2, 3, 4), 0)
    # All decode from 2.5 to 4.0: of the first only 3.0 to 4.0, of the late one 2.5 to 3.5.
    assert steady_gaps_s([first, late]) == [1.0, 1.0]


def test_a_command_is_recorded_as_it_was_given(monkeypatch):
    argv = ["/venv/bin/hicache", "bench", "trace", "a b"]
    monkeypatch.setattr(run_record.sys, "argv", argv)
    assert run_record.run_record()["command"] == "hicache bench trace 'a b'"
    monkeypatch.setattr(run_record.sys, "argv", ["benchmarks/restore.py", "--repeat", "1"])
    assert run_record.run_record()["command"] == "python benchmarks/restore.py --repeat 1"


def test_an_installed_package_has_no_commit_of_a_checkout_around_it(monkeypatch, tmp_path):
    monkeypatch.setattr(run_record, "ROOT", tmp_path)
    assert run_record.run_record()["commit"] == "of the installed version"
