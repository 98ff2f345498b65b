"""Statistics objects, the Prometheus side on real registries, and our loggers beside vLLM's."""

import logging
import pickle
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_hicache.connectors.stats import (
    HiCachePromMetrics,
    HiCacheStats,
    attach_loggers,
    detach_loggers,
)
from vllm_hicache.metrics import Metrics
from vllm_hicache.series import SECONDS_BUCKETS, SERIES

pytestmark = pytest.mark.vllm

LABELS = ["model_name", "engine"]
ENGINES = {0: ["tiny", "0"], 1: ["tiny", "1"]}


class Prometheus:
    """The three real metric classes, bound to a registry of their own."""

    def __init__(self):
        self.registry = CollectorRegistry()
        types = {
            base: type(base.__name__, (base,), {"__init__": self._bound(base)})
            for base in (Gauge, Counter, Histogram)
        }
        config = SimpleNamespace(kv_transfer_config=None)
        self.metrics = HiCachePromMetrics(config, types, LABELS, ENGINES)

    def _bound(self, base):
        def init(metric, *args, **kwargs):
            kwargs.setdefault("registry", self.registry)
            base.__init__(metric, *args, **kwargs)

        return init

    def value(self, name, engine=0, **labels):
        labels = {"model_name": "tiny", "engine": str(engine), **labels}
        return self.registry.get_sample_value(f"vllm:hicache_{name}", labels)


@pytest.fixture
def prometheus():
    return Prometheus()


def _stats(**data):
    return HiCacheStats(data=data)


@pytest.mark.parametrize("engine", [0, 1])
def test_every_series_exists_at_zero_after_construction(prometheus, engine):
    for series in SERIES:
        labels = [{series.label: value} for value in series.values] or [{}]
        suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[series.kind]
        for own in labels:
            assert prometheus.value(series.name + suffix, engine, **own) == 0.0


def test_observed_deltas_add_up_for_their_engine_only(prometheus):
    metrics = Metrics()
    for tokens in (256, 512):
        metrics.count("served_tokens", tokens, "storage")
        metrics.gauge("host_slots_used", tokens)
        prometheus.metrics.observe(metrics.take_delta(), engine_idx=1)
    assert prometheus.value("served_tokens_total", 1, tier="storage") == 768.0
    assert prometheus.value("served_tokens_total", 0, tier="storage") == 0.0
    assert prometheus.value("served_tokens_total", 1, tier="host") == 0.0
    assert prometheus.value("host_slots_used", 1) == 512.0
    assert prometheus.value("host_slots_used", 0) == 0.0


def test_durations_fall_into_the_declared_buckets(prometheus):
    prometheus.metrics.observe({"fetch_seconds": [0.003, 0.004, 100.0]}, engine_idx=0)
    assert prometheus.value("fetch_seconds_count") == 3.0
    assert prometheus.value("fetch_seconds_sum") == pytest.approx(100.007)
    assert prometheus.value("fetch_seconds_bucket", le="0.002") == 0.0
    assert prometheus.value("fetch_seconds_bucket", le="0.005") == 2.0
    assert prometheus.value("fetch_seconds_bucket", le="30.0") == 2.0
    assert prometheus.value("fetch_seconds_bucket", le="+Inf") == 3.0
    assert list(SECONDS_BUCKETS) == sorted(SECONDS_BUCKETS)


def test_every_declared_key_reaches_prometheus(prometheus):
    metrics = Metrics()
    for series in SERIES:
        for value in series.values or ("",):
            if series.kind == "counter":
                metrics.count(series.name, 2, value)
            elif series.kind == "gauge":
                metrics.gauge(series.name, 2, value)
            else:
                metrics.observe(series.name, 2)
    before = generate_latest(prometheus.registry).decode().splitlines()
    prometheus.metrics.observe(metrics.take_delta(), engine_idx=0)
    after = generate_latest(prometheus.registry).decode().splitlines()
    changed = {line.split("{")[0] for line in set(after) - set(before)}
    for series in SERIES:
        suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[series.kind]
        assert f"vllm:hicache_{series.name}{suffix}" in changed


def test_unknown_statistic_or_engine_is_left_out_and_said_once(prometheus, monkeypatch):
    records = []
    logger = logging.getLogger("vllm_hicache.connectors.stats")
    monkeypatch.setattr(logger, "handle", records.append)
    for _ in range(3):
        prometheus.metrics.observe({"newer_series": 1.0}, engine_idx=0)
        prometheus.metrics.observe({"saved_bytes": 1.0}, engine_idx=7)
    assert len(records) == 2
    assert prometheus.value("saved_bytes_total") == 0.0


def test_vllms_own_prometheus_logger_accepts_our_series_twice():
    """An engine that is built again in one process unregisters vLLM's series by name."""
    from prometheus_client import REGISTRY
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    for _ in range(2):
        unregister_vllm_metrics()
        HiCachePromMetrics(config, types, LABELS, ENGINES).observe({"resets": 1.0}, 0)
        labels = dict(zip(LABELS, ENGINES[0], strict=True))
        assert REGISTRY.get_sample_value("vllm:hicache_resets_total", labels) == 1.0
    unregister_vllm_metrics()


def test_nothing_changed_means_no_statistics():
    metrics = Metrics()
    assert HiCacheStats.take(metrics) is None
    metrics.count("resets")
    stats = HiCacheStats.take(metrics)
    assert not stats.is_empty()
    assert stats.to_dict() == {"resets": 1.0}
    stats.reset()
    assert stats.is_empty()


def test_aggregation_adds_counters_appends_durations_and_keeps_the_last_gauge():
    first = _stats(saved_bytes=1.0, load_seconds=[0.1], host_slots_used=5.0)
    second = _stats(saved_bytes=2.0, resets=1.0, load_seconds=[0.2], host_slots_used=3.0)
    other = dict(second.data)
    total = first.aggregate(second)
    assert total.data == {
        "saved_bytes": 3.0,
        "resets": 1.0,
        "load_seconds": [0.1, 0.2],
        "host_slots_used": 3.0,
    }
    total.aggregate(_stats(load_seconds=[0.3]))
    assert second.data == other == {**other, "load_seconds": [0.2]}


def test_two_loggers_that_share_a_payload_do_not_count_it_twice():
    payloads = [{"saved_bytes": 1.0, "load_seconds": [0.1]} for _ in range(3)]
    totals = []
    for _ in range(2):
        total = HiCacheStats(data=payloads[0])
        for payload in payloads[1:]:
            total.aggregate(HiCacheStats(data=payload))
        totals.append(total.data)
    assert totals == [{"saved_bytes": 3.0, "load_seconds": [0.1] * 3}] * 2
    assert payloads == [{"saved_bytes": 1.0, "load_seconds": [0.1]}] * 3


def test_summary_for_vllms_log_line_holds_whole_numbers_that_are_not_zero():
    stats = _stats(**{"served_tokens/host": 256.0, "saved_bytes": 0.0, "load_seconds": [0.1]})
    assert stats.reduce() == {"served_tokens_host": 256}


def _full_delta():
    metrics = Metrics()
    metrics.count("served_tokens", 256, "host")
    metrics.gauge("host_slots_used", 3)
    metrics.observe("load_seconds", 0.25)
    return metrics.take_delta()


def test_statistics_survive_vllms_message_to_the_front_end():
    stats = SchedulerStats(kv_connector_stats=HiCacheStats(data=_full_delta()).to_dict())
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    received = MsgpackDecoder(EngineCoreOutputs).decode(sent)
    assert received.scheduler_stats.kv_connector_stats == _full_delta()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(_full_delta())) == _full_delta()


def test_statistics_survive_pickling_from_a_worker():
    stats = pickle.loads(pickle.dumps(HiCacheStats(data=_full_delta())))
    assert isinstance(stats, HiCacheStats)
    assert stats.data == _full_delta()


@pytest.fixture
def loggers():
    """vLLM's logger with one recording handler, ours without any; both restored afterwards."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_hicache")
    kept = [(x, x.handlers, x.level, x.propagate) for x in (theirs, ours)]
    detach_loggers()
    theirs.handlers, ours.handlers = [Recorder()], []
    theirs.setLevel(logging.INFO)
    theirs.propagate = False
    yield theirs, ours
    detach_loggers()
    for logger, handlers, level, propagate in kept:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


class Recorder(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_our_lines_appear_once_on_vllms_handler_and_level(loggers):
    theirs, ours = loggers
    root = Recorder()
    logging.getLogger().addHandler(root)
    try:
        for _ in range(3):
            attach_loggers()
        child = logging.getLogger("vllm_hicache.planner")
        child.info("hello")
        child.debug("details")
    finally:
        logging.getLogger().removeHandler(root)
    assert theirs.handlers[0].lines == ["hello"]
    assert root.lines == []
    assert ours.handlers == theirs.handlers


def test_changed_set_up_of_vllm_is_followed_at_the_next_call(loggers):
    theirs, ours = loggers
    attach_loggers()
    before = theirs.handlers[0]
    theirs.handlers = [Recorder()]
    theirs.setLevel(logging.DEBUG)
    theirs.propagate = True
    attach_loggers()
    ours.debug("details")
    assert before.lines == []
    assert theirs.handlers[0].lines == ["details"]
    assert ours.propagate


def test_logger_that_the_user_set_up_is_left_alone(loggers):
    theirs, ours = loggers
    own = Recorder()
    ours.addHandler(own)
    ours.setLevel(logging.ERROR)
    attach_loggers()
    ours.error("bad")
    ours.info("hello")
    assert own.lines == ["bad"]
    assert theirs.handlers[0].lines == []
    ours.removeHandler(own)


def test_detached_logger_goes_back_to_the_root(loggers):
    _, ours = loggers
    attach_loggers()
    detach_loggers()
    assert ours.handlers == []
    assert ours.propagate
    assert ours.level == logging.NOTSET
