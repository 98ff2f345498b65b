"""Stands between layered loads and the blocks: records, slows and fails spans of layers."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_hicache.kernels.layer_spans import LayerSpans


@dataclass
class SpanSpy:
    """What happens to spans of this process from now on. Attributes may be changed at any time."""

    events: list[str] = field(default_factory=list)
    """``span N`` when a span of a load is in its blocks, and what a test adds."""
    delay_s: float = 0.0
    """What each span takes longer."""
    gates: dict[int, threading.Event] = field(default_factory=dict)
    """A span waits for its gate before it is copied."""
    fails_at: int | None = None
    """This span raises instead of being copied."""

    def before(self, first: int) -> None:
        if self.fails_at == first:
            raise OSError("told to fail")
        gate = self.gates.get(first)
        assert gate is None or gate.wait(60)
        time.sleep(self.delay_s)


@contextmanager
def spying_spans() -> Iterator[SpanSpy]:
    """Engines that start inside are spied upon. On a CPU only."""
    spy, load = SpanSpy(), LayerSpans.load_straight

    def spied(spans: LayerSpans, span: Any, units: np.ndarray, host: torch.Tensor) -> None:
        spy.before(span.first)
        load(spans, span, units, host)
        spy.events.append(f"span {span.first}")

    LayerSpans.load_straight = spied
    try:
        yield spy
    finally:
        for gate in spy.gates.values():
            gate.set()
        LayerSpans.load_straight = load
