"""Series, counters, the ledger of hits, storage counters and the activity line."""

import logging
import re
from pathlib import Path

import pytest

from vllm_hicache.activity import ActivityLine, format_bytes
from vllm_hicache.errors import InvariantBroken
from vllm_hicache.metrics import MAX_PENDING_DURATIONS, SERIES, Ledger, Metrics, StorageCounters

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_every_series_has_a_unique_name_and_a_help_sentence():
    names = [series.name for series in SERIES]
    assert len(names) == len(set(names)) > 30
    for series in SERIES:
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", series.name)
        assert series.help.endswith(".")
        assert (series.label is None) == (series.values == ())


def test_every_series_is_in_the_totals_at_zero_before_any_event():
    totals = Metrics().totals()
    assert set(totals.values()) == {0.0}
    for series in SERIES:
        for key in series.keys:
            suffixes = ("_count", "_sum") if series.kind == "histogram" else ("",)
            assert all(key + suffix in totals for suffix in suffixes)


@pytest.mark.parametrize(
    ("name", "label"),
    [("no_such_counter", ""), ("found_tokens", ""), ("found_tokens", "tape"), ("resets", "host")],
)
def test_undeclared_name_or_label_breaks_an_invariant(name, label):
    with pytest.raises(InvariantBroken, match=name):
        Metrics().count(name, 1, label)


def test_a_series_is_only_written_as_its_own_kind():
    metrics = Metrics()
    with pytest.raises(InvariantBroken):
        metrics.gauge("saved_bytes", 1)
    with pytest.raises(InvariantBroken):
        metrics.count("host_slots_used", 1)
    with pytest.raises(InvariantBroken):
        metrics.observe("saved_bytes", 1)


@pytest.mark.parametrize("value", [-1, float("nan")])
def test_counter_can_only_grow(value):
    with pytest.raises(InvariantBroken, match="grow"):
        Metrics().count("saved_bytes", value)


def test_delta_holds_what_changed_since_the_last_take():
    metrics = Metrics()
    metrics.count("saved_bytes", 10)
    metrics.count("saved_bytes", 5)
    metrics.count("served_tokens", 256, "storage")
    metrics.count("resets", 0)
    metrics.gauge("host_slots_used", 3)
    metrics.observe("load_seconds", 0.25)
    metrics.observe("load_seconds", 0.5)
    assert metrics.take_delta() == {
        "saved_bytes": 15.0,
        "served_tokens/storage": 256.0,
        "host_slots_used": 3.0,
        "load_seconds": [0.25, 0.5],
    }
    metrics.gauge("host_slots_used", 3)
    assert metrics.take_delta() == {}
    metrics.count("saved_bytes", 1)
    assert metrics.take_delta() == {"saved_bytes": 1.0}
    assert metrics.totals()["saved_bytes"] == 16.0
    assert metrics.totals()["load_seconds_count"] == 2.0
    assert metrics.totals()["load_seconds_sum"] == 0.75


def test_taken_delta_is_not_changed_by_later_events():
    metrics = Metrics()
    metrics.observe("load_seconds", 0.25)
    delta = metrics.take_delta()
    metrics.observe("load_seconds", 0.5)
    assert delta == {"load_seconds": [0.25]}


def test_durations_that_nobody_takes_are_bounded_but_still_counted():
    metrics = Metrics()
    for _ in range(MAX_PENDING_DURATIONS + 10):
        metrics.observe("save_seconds", 1.0)
    assert len(metrics.take_delta()["save_seconds"]) == MAX_PENDING_DURATIONS
    assert metrics.totals()["save_seconds_count"] == MAX_PENDING_DURATIONS + 10


def test_closed_request_settles_everything_that_was_found():
    metrics = Metrics()
    ledger = Ledger(metrics)
    ledger.found("a", "host", 512)
    ledger.found("a", "storage", 1024)
    ledger.served("a", "host", 512)
    ledger.served("a", "storage", 256)
    ledger.unserved("a", "storage", "short_fetch", 512)
    assert ledger.open_tokens("a") == 256
    assert ledger.num_open == 1
    ledger.balance()
    assert ledger.close("a", "aborted") == 256
    ledger.balance()
    assert ledger.num_open == 0
    totals = metrics.totals()
    found = totals["found_tokens/host"] + totals["found_tokens/storage"]
    served = totals["served_tokens/host"] + totals["served_tokens/storage"]
    reasons = sum(v for key, v in totals.items() if key.startswith("unserved_tokens/"))
    assert (found, served, reasons) == (1536.0, 768.0, 768.0)
    assert totals["unserved_tokens/aborted"] == 256.0
    assert totals["unserved_tier_tokens/host"] == 0.0
    assert totals["unserved_tier_tokens/storage"] == 768.0


def test_request_without_a_hit_closes_without_a_reason():
    metrics = Metrics()
    ledger = Ledger(metrics)
    ledger.found("a", "host", 0)
    assert ledger.close("a", "aborted") == 0
    assert ledger.close("never seen", "aborted") == 0
    assert metrics.totals()["unserved_tokens/aborted"] == 0.0


def test_request_can_be_opened_again_after_preemption():
    ledger = Ledger(Metrics())
    ledger.found("a", "host", 256)
    ledger.served("a", "host", 256)
    ledger.close("a", "aborted")
    ledger.found("a", "host", 512)
    assert ledger.open_tokens("a") == 512
    ledger.balance()


def test_more_served_than_found_in_that_tier_breaks_an_invariant():
    ledger = Ledger(Metrics())
    ledger.found("a", "host", 256)
    ledger.found("a", "storage", 256)
    with pytest.raises(InvariantBroken, match="request a"):
        ledger.served("a", "host", 257)
    with pytest.raises(InvariantBroken, match="request a"):
        ledger.unserved("a", "host", "cap", 257)
    ledger.unserved("a", "host", "cap", 256)
    with pytest.raises(InvariantBroken, match="request a"):
        ledger.served("a", "host", 1)
    with pytest.raises(InvariantBroken, match="request a"):
        ledger.unserved("a", "host", "cap", 1)
    with pytest.raises(InvariantBroken, match="request b"):
        ledger.served("b", "storage", 1)


def test_refused_entry_changes_neither_the_ledger_nor_the_counters():
    metrics = Metrics()
    ledger = Ledger(metrics)
    ledger.found("a", "host", 256)
    with pytest.raises(InvariantBroken):
        ledger.unserved("a", "host", "no such reason", 256)
    with pytest.raises(InvariantBroken):
        ledger.served("a", "host", 512)
    assert ledger.open_tokens("a") == 256
    assert metrics.totals()["served_tokens/host"] == 0.0
    ledger.balance()


def test_balance_notices_an_account_that_vanished():
    ledger = Ledger(Metrics())
    ledger.found("a", "host", 256)
    ledger._accounts.clear()
    with pytest.raises(InvariantBroken, match="found 256"):
        ledger.balance()


def test_storage_counters_add_up_over_reports_workers_and_restarts():
    metrics = Metrics()
    storage = StorageCounters(metrics)
    storage.absorb(0, 1, {"objects_read": 5.0, "bytes_read": 100.0})
    storage.absorb(0, 1, {"objects_read": 7.0})
    storage.absorb(1, 1, {"objects_read": 10.0})
    storage.absorb(0, 2, {"objects_read": 2.0, "bytes_read": 1.0})
    assert metrics.totals()["objects_read"] == 19.0
    assert metrics.totals()["bytes_read"] == 101.0


def test_repeated_or_overtaken_storage_report_counts_nothing_twice():
    metrics = Metrics()
    storage = StorageCounters(metrics)
    for value in (5.0, 5.0, 3.0, 6.0):
        storage.absorb(0, 1, {"objects_written": value})
    assert metrics.totals()["objects_written"] == 6.0


def test_storage_gauges_are_summed_over_workers_and_dropped_with_their_process():
    metrics = Metrics()
    storage = StorageCounters(metrics)
    storage.absorb(0, 1, {"breaker_open": 1.0, "write_backlog_bytes": 100.0, "objects_read": 1.0})
    storage.absorb(1, 1, {"breaker_open": 1.0, "write_backlog_bytes": 50.0})
    assert metrics.totals()["breaker_open"] == 2.0
    assert metrics.totals()["write_backlog_bytes"] == 150.0
    storage.forget(0)
    assert metrics.totals()["breaker_open"] == 1.0
    assert metrics.totals()["write_backlog_bytes"] == 50.0
    storage.absorb(0, 1, {"objects_read": 1.0})
    assert metrics.totals()["objects_read"] == 1.0


def test_use_of_a_shared_store_is_not_added_over_workers_but_hung_threads_are():
    metrics = Metrics()
    storage = StorageCounters(metrics)
    for worker_id, used in enumerate((500.0, 700.0)):
        storage.absorb(worker_id, 1, {"used_bytes_now": used, "hung_threads_now": 2.0})
    assert metrics.totals()["storage_used_bytes"] == 700.0
    assert metrics.totals()["storage_hung_threads"] == 4.0


def test_every_number_of_the_file_backend_that_an_operator_needs_is_taken():
    from vllm_hicache.storage_backends.file import COUNTERS

    metrics = Metrics()
    StorageCounters(metrics).absorb(0, 1, dict.fromkeys(COUNTERS, 1.0))
    taken = {name for name in COUNTERS if metrics.totals().get(name) == 1.0}
    assert set(COUNTERS) - taken == {"leftovers_removed", "sweeps", "sweep_seconds"}


def test_storage_report_cannot_write_the_schedulers_own_series():
    metrics = Metrics()
    storage = StorageCounters(metrics)
    storage.absorb(0, 1, {"saved_bytes": 5.0, "host_slots_used": 4.0, "backend_own": 3.0})
    assert set(metrics.totals().values()) == {0.0}


def test_activity_line_tells_hits_bytes_and_rates():
    metrics = Metrics()
    activity = ActivityLine(metrics, interval_s=10.0, clock=Clock())
    metrics.count("lookup_tokens", 20480)
    metrics.count("served_tokens", 12288, "host")
    metrics.count("served_tokens", 4096, "storage")
    metrics.count("saved_bytes", 1_200_000_000)
    metrics.observe("save_seconds", 0.5)
    metrics.count("fetched_bytes", 3_000_000)
    metrics.gauge("host_slots_total", 2000)
    metrics.gauge("host_slots_ready", 2000)
    metrics.gauge("breaker_open", 1)
    line = activity.line()
    assert line.startswith("HiCache: hits host 12,288 storage 4,096 of 20,480 tokens, ")
    assert "saved 1.2 GB at 2.4 GB/s" in line
    assert "fetched 3.0 MB" in line
    assert "host slots 0/2,000, " in line
    assert line.endswith("backlog 0 B, breaker open")


def test_activity_line_tells_how_many_slots_are_ready_while_not_all_are():
    metrics = Metrics()
    activity = ActivityLine(metrics, interval_s=10.0, clock=Clock())
    metrics.count("lookup_tokens", 20480)
    metrics.gauge("host_slots_total", 2000)
    metrics.gauge("host_slots_ready", 1500)
    assert "host slots 0/2,000 (1,500 ready), " in activity.line()


def test_activity_line_covers_its_interval_only_and_idle_intervals_say_nothing():
    metrics = Metrics()
    activity = ActivityLine(metrics, interval_s=10.0, clock=Clock())
    metrics.count("saved_bytes", 1000)
    assert "saved 1.0 kB" in activity.line()
    metrics.gauge("host_slots_used", 1)
    assert activity.line() is None
    metrics.count("saved_bytes", 2000)
    assert "saved 2.0 kB" in activity.line()


def test_activity_is_logged_once_an_interval(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm_hicache"), "propagate", True)
    caplog.set_level("INFO", logger="vllm_hicache")
    metrics, clock = Metrics(), Clock()
    activity = ActivityLine(metrics, interval_s=10.0, clock=clock)
    for _ in range(50):
        clock.now += 0.5
        metrics.count("lookup_tokens", 16)
        activity.poll()
    lines = [r for r in caplog.records if r.getMessage().startswith("HiCache: hits")]
    assert len(lines) == 2


def test_fruitless_saving_is_said_once_and_only_while_nothing_was_loaded():
    metrics = Metrics()
    activity = ActivityLine(metrics, interval_s=10.0, clock=Clock())
    metrics.count("saved_bytes", 2_000_000_000)
    metrics.count("lookups", 99)
    assert activity.fruitless_warning() is None
    metrics.count("lookups")
    assert "stored 2.0 GB, loaded 0 in 100 lookups" in activity.fruitless_warning()
    assert activity.fruitless_warning() is None

    fruitful = ActivityLine(metrics, interval_s=10.0, clock=Clock())
    metrics.count("loaded_bytes", 1, "sync")
    assert fruitful.fruitless_warning() is None


def test_bytes_are_written_in_the_unit_that_fits():
    assert format_bytes(999) == "999 B"
    assert format_bytes(999_949) == "1.0 MB"
    assert format_bytes(12_345_678_900) == "12.3 GB"
    assert format_bytes(5e15) == "5000.0 TB"


def test_documentation_lists_every_series_with_its_help_and_an_alert():
    text = DOCS.read_text()
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 4:
            rows[cells[0].strip("`")] = cells[1:]
    wanted = {f"{s.name}{{{s.label}}}" if s.label else s.name: s for s in SERIES}
    assert set(rows) == set(wanted)
    for name, series in wanted.items():
        kind, meaning, alert = rows[name]
        assert kind == series.kind
        assert meaning.startswith(series.help)
        assert len(alert) > 3
        assert all(f"`{value}`" in text for value in series.values)
