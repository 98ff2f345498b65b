"""Loads of a step that its forward waits for layer by layer (``load_mode: layerwise``)."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from vllm_hicache.errors import ConfigError, InvariantBroken, LayerLoadFailed
from vllm_hicache.kernels.layer_spans import LayerSpans
from vllm_hicache.layered_loads import LayeredLoads, LoadSpans
from vllm_hicache.plan import CopyOp
from vllm_hicache.transfer import CopyEngine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_hicache.connectors.kv_pools import WorkerPool

LAYER_TIMEOUT_S = 30.0
"""Longest wait for a layer to be enqueued; after this long something is broken, and the forward
must not read the blocks."""


def check_worker_pools(vllm_config: "VllmConfig", pools: "Sequence[WorkerPool]") -> None:
    """Refuse what layers cannot wait for one by one, beyond what the options refuse."""
    if len(pools) > 1:
        names = ", ".join(one.pool.name for one in pools)
        raise ConfigError(
            f'load_mode must be "async" for this model, got "layerwise": its pages have '
            f"{len(pools)} kinds of rows ({names}), and layers can wait for one kind"
        )
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is not None and mode.has_full_cudagraphs():
        raise ConfigError(
            f'load_mode must be "async" with cudagraph_mode {mode.name}, got "layerwise": a graph '
            "of the whole model does not stop at its layers; allowed: PIECEWISE and NONE"
        )


class LayerWaits:
    """Where one worker's forward stands among the loads of its step. On the worker's thread.

    spans   of the worker's only pool
    places  of its layers in pages, by vLLM's names
    """

    def __init__(
        self,
        engine: CopyEngine,
        spans: LayerSpans,
        host: torch.Tensor,
        places: Mapping[str, int],
        *,
        worker_id: int,
    ) -> None:
        self._engine = engine
        self._spans = {name: spans.span_of(place) for name, place in places.items()}
        self._load: LoadSpans = partial(spans.load, host=host)
        self._worker_id = worker_id
        self._added: list[CopyOp] = []
        self._loads: LayeredLoads | None = None
        self._waited: set[str] = set()

    def add(self, op: CopyOp) -> None:
        """A load of the step that begins."""
        self._added.append(op)

    def start(self) -> None:
        """Start what was added, behind everything that was enqueued before."""
        ops, self._added = self._added, []
        if not ops:
            return
        loads = LayeredLoads([op.op_id for op in ops], [op.copies for op in ops])
        self._engine.submit_layered(loads, self._load, self._engine.fence())
        self._loads = loads
        self._waited = set()

    def wait(self, layer_name: str) -> None:
        """The forward comes to this layer. Raises LayerLoadFailed, which stops the engine."""
        loads = self._loads
        span = self._spans.get(layer_name)
        if loads is None or span is None:  # a layer without KV of its own reads another one's
            return
        self._waited.add(layer_name)
        try:
            loads.make_current_stream_wait(span, LAYER_TIMEOUT_S)
        except LayerLoadFailed as error:
            self._loads = None
            raise LayerLoadFailed(
                f"worker {self._worker_id}: layer {layer_name} needs load "
                f"{_numbers(loads)}: {error}; the step cannot be computed without it"
            ) from error

    def end(self) -> None:
        """The forward is over: refuse to go on if a layer did not wait for its load."""
        loads, self._loads = self._loads, None
        if loads is None:
            return
        missing = self._spans.keys() - self._waited
        # An error that ended the forward says more.
        if missing and sys.exc_info()[1] is None:
            raise InvariantBroken(
                f"worker {self._worker_id}: the forward did not wait for load {_numbers(loads)} in "
                f"{len(missing)} of {len(self._spans)} layers ({min(missing)}, ...): vLLM did not "
                "call wait_for_layer_load there; load_mode layerwise does not work with it"
            )


def _numbers(loads: LayeredLoads) -> str:
    return ", ".join(map(str, loads.op_ids))
