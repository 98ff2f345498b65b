"""Our metrics as vLLM's statistics objects and Prometheus series, and our log lines as its own.

The API server imports this file too: nothing here touches a device or starts a thread.
"""

import logging
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
)

from vllm_hicache.metrics import Metrics
from vllm_hicache.series import SECONDS_BUCKETS, SERIES, Series

PREFIX = "vllm:hicache_"

logger = logging.getLogger(__name__)

_GAUGE_KEYS = frozenset(key for s in SERIES if s.kind == "gauge" for key in s.keys)

# What vLLM's own periodic "KV Transfer metrics" line shows of us; the rest is in Prometheus.
_SUMMARY = (
    "served_tokens/host",
    "served_tokens/storage",
    "saved_bytes",
    "loaded_bytes/sync",
    "loaded_bytes/async",
    "fetched_bytes",
    "persisted_bytes",
)


class HiCacheStats(KVConnectorStats):
    """One delta of ``Metrics`` on its way to the front end: floats and lists of floats only."""

    @classmethod
    def take(cls, metrics: Metrics) -> "HiCacheStats | None":
        """What changed since the last take, or None where nothing did."""
        delta = metrics.take_delta()
        return cls(data=delta) if delta else None

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """True if nothing changed."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "HiCacheStats":
        """Fold a later delta in: counters add, durations are appended, the last gauge wins.

        Neither payload is changed: several loggers of a front end hold the same one.
        """
        data = dict(self.data)
        for key, value in other.data.items():
            if isinstance(value, list):
                data[key] = [*data.get(key, ()), *value]
            elif key in _GAUGE_KEYS:
                data[key] = value
            else:
                data[key] = data.get(key, 0.0) + value
        self.data = data
        return self

    def reduce(self) -> dict[str, int | float]:
        """The few numbers for vLLM's periodic log line, those that are not 0."""
        return {
            key.replace("/", "_"): int(self.data[key]) for key in _SUMMARY if self.data.get(key)
        }


class HiCachePromMetrics(KVConnectorPromMetrics):
    """Every series of ``SERIES`` in Prometheus, at 0 from the start, for every engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetric]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # (engine, key) -> the labelled child; making a child is what makes the series exist.
        self._children: dict[tuple[int, str], Any] = {}
        self._unknown: set[str] = set()
        for series in SERIES:
            self._declare(series)

    def _declare(self, series: Series) -> None:
        labels = [*self._labelnames, series.label] if series.label else list(self._labelnames)
        name, text = PREFIX + series.name, series.help
        metric: Any
        if series.kind == "counter":
            metric = self._counter_cls(name=name, documentation=text, labelnames=labels)
        elif series.kind == "gauge":
            metric = self._gauge_cls(
                name=name, documentation=text, labelnames=labels, multiprocess_mode="mostrecent"
            )
        else:
            metric = self._histogram_cls(
                name=name, documentation=text, labelnames=labels, buckets=list(SECONDS_BUCKETS)
            )
        for engine, values in self.per_engine_labelvalues.items():
            for key, value in zip(series.keys, series.values or (None,), strict=True):
                own = () if value is None else (value,)
                self._children[engine, key] = metric.labels(*values, *own)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add one delta of an engine. A key or engine that was not declared is left out."""
        for key, value in transfer_stats_data.items():
            child = self._children.get((engine_idx, key))
            if child is None:
                self._say_once(key, engine_idx)
            elif isinstance(value, list):
                for duration in value:
                    child.observe(duration)
            elif key in _GAUGE_KEYS:
                child.set(value)
            else:
                child.inc(value)

    def _say_once(self, key: str, engine_idx: int) -> None:
        if key not in self._unknown:
            self._unknown.add(key)
            logger.warning("statistic %r of engine %d is not declared", key, engine_idx)


_attached: list[logging.Handler] = []


def attach_loggers() -> None:
    """Let ``vllm_hicache`` log where and how vLLM does: it sets up its own logger only.

    Copies the handlers, level and propagation of logger ``vllm``; calling again follows a
    changed set-up. A logger that somebody gave handlers of its own is left alone.
    """
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_hicache")
    if any(handler not in _attached for handler in ours.handlers):
        return
    detach_loggers()
    for handler in theirs.handlers:
        ours.addHandler(handler)
        _attached.append(handler)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


def detach_loggers() -> None:
    """Undo ``attach_loggers``: no handler, level not set, records go to the root logger."""
    ours = logging.getLogger("vllm_hicache")
    for handler in _attached:
        ours.removeHandler(handler)
    _attached.clear()
    ours.setLevel(logging.NOTSET)
    ours.propagate = True
