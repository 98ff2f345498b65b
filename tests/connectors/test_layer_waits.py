"""Layers that wait for their loads, by vLLM's own code of both model runners.

A step's forward asks for each layer, and notes what lies in the loaded block of that layer then.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from vllm_hicache.connectors.hicache import HiCacheConnector
from vllm_hicache.connectors.layer_waits import LayerWaits, check_worker_pools
from vllm_hicache.connectors.messages import PlanMetadata
from vllm_hicache.device_layout import DeviceGroup, RowFormat, TensorPlacement, device_layers
from vllm_hicache.errors import ConfigError, InvariantBroken, LayerLoadFailed
from vllm_hicache.host_pool import HostPool
from vllm_hicache.kernels.layer_spans import LayerSpans
from vllm_hicache.kernels.reference import PageCopier, PoolsCopier
from vllm_hicache.layout import LayerSpan, PageLayout
from vllm_hicache.plan import CopyOp, StepPlan
from vllm_hicache.progress_board import ProgressBoard
from vllm_hicache.transfer import CopyEngine

pytestmark = pytest.mark.vllm

NUM_LAYERS, NUM_BLOCKS, NUM_SLOTS = 3, 4, 2
LAYOUT = PageLayout(4, LayerSpan(0, NUM_LAYERS), NUM_LAYERS, 0, 1, 1, 1, 32, 0)
NAMES = [f"model.layers.{number}.self_attn.attn" for number in range(NUM_LAYERS)]
EXTRA = {"load_mode": "layerwise"}


@dataclass
class Worker:
    """A worker's connector over real memory, and vLLM's ways to run a step on it."""

    connector: HiCacheConnector
    config: VllmConfig
    kv: torch.Tensor
    seen: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=lambda: list(NAMES))
    """Layers that the forward comes to."""
    error: Exception | None = None
    """Raised by the forward at its end."""

    def forward(self, block: int) -> None:
        for name in self.names:
            self.connector.wait_for_layer_load(name)
            if name in NAMES:
                layer = self.kv.view(NUM_LAYERS, NUM_BLOCKS, -1)[NAMES.index(name)]
                self.seen.append(int(layer[block, 0]))
        if self.error is not None:
            raise self.error

    def v1(self, output: SchedulerOutput, block: int, *, defers: bool = False) -> None:
        self.connector.handle_preemptions(output.kv_connector_metadata)
        hooks = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output, defers)
        with set_forward_context(None, self.config), hooks:
            self.forward(block)

    def v1_speculating(self, output: SchedulerOutput, block: int) -> None:
        self.v1(output, block, defers=True)
        KVConnectorModelRunnerMixin.finalize_kv_connector()

    def v2(self, output: SchedulerOutput, block: int) -> None:
        runner = object.__new__(ActiveKVConnector)
        runner.vllm_config, runner.kv_connector = self.config, self.connector
        runner._pending_load_kwargs, runner._disabled = None, False
        with set_forward_context(None, self.config):
            runner.pre_forward(output)
            self.forward(block)
        runner.finish_forward()
        runner.post_forward(set())


Run = Callable[[Worker, SchedulerOutput, int], None]
RUNNERS: dict[str, Run] = {
    "V1": Worker.v1,
    "V1 with n-grams": Worker.v1_speculating,
    "V2": Worker.v2,
}
runners = pytest.mark.parametrize("run", RUNNERS.values(), ids=RUNNERS)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    config = VllmConfig(
        kv_transfer_config=KVTransferConfig(
            kv_connector="HiCacheConnector",
            kv_connector_module_path="vllm_hicache.connectors.hicache",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=EXTRA,
        )
    )
    connector = HiCacheConnector(config, KVConnectorRole.WORKER, None)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    block = LAYOUT.page_bytes // NUM_LAYERS
    placement = TensorPlacement(tuple(range(NUM_LAYERS)), NUM_BLOCKS, NUM_BLOCKS * block, block)
    layers = device_layers(placement, RowFormat(1, 16, 16, 2), layout_name="LBNHC", block_size=4)
    group = DeviceGroup(0, 4, (layers,))
    kv = torch.zeros(NUM_LAYERS * NUM_BLOCKS * block, dtype=torch.uint8)
    side = connector.worker_side
    side.pool, side._board = HostPool(NUM_SLOTS, [LAYOUT.slot_stride]), ProgressBoard()
    for number in range(NUM_LAYERS):
        side.pool.tensors[0][:, number * block : (number + 1) * block] = 10 + number
    copier = PoolsCopier([PageCopier(kv, [group], LAYOUT)])
    side.engine = CopyEngine(copier, side.pool, publish=side._publish, device=kv.device)
    places = {name: place for place, name in enumerate(NAMES)}
    spans = LayerSpans(kv, group, LAYOUT)
    side.layers = LayerWaits(side.engine, spans, side.pool.tensors[0], places, worker_id=0)
    board = side._board
    yield Worker(connector, config, kv)
    connector.shutdown()
    board.close()


def step_of(plan: StepPlan) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = PlanMetadata(plan)
    output.has_sync_kv_loads = bool(plan.sync_loads)
    return output


def load_of(op_id: int, block: int = 2) -> CopyOp:
    return CopyOp(op_id, np.array([[op_id % NUM_SLOTS, 0, block, 0]], dtype=np.int32))


@runners
def test_each_layer_finds_its_own_part_of_the_load(worker: Worker, run: Run) -> None:
    run(worker, step_of(StepPlan(1)), 2)
    run(worker, step_of(StepPlan(2, sync_loads=(load_of(1), load_of(2, block=3)))), 3)
    run(worker, step_of(StepPlan(3)), 2)
    assert worker.seen == [0, 0, 0, 10, 11, 12, 10, 11, 12]
    assert worker.connector.worker_side.engine.wait("load", 2, 10)
    assert worker.connector.worker_side.report().progress[0].loads_done == 2


@runners
def test_layers_without_kv_of_their_own_do_not_wait(worker: Worker, run: Run) -> None:
    worker.names.append("model.layers.3.self_attn.attn")
    run(worker, step_of(StepPlan(1, sync_loads=(load_of(1),))), 2)
    assert worker.seen == [10, 11, 12]


@runners
def test_a_forward_that_leaves_a_layer_out_stops_the_engine(worker: Worker, run: Run) -> None:
    worker.names = NAMES[:2]
    message = r"did not wait for load 1 in 1 of 3 layers \(model\.layers\.2\.self_attn\.attn, "
    with pytest.raises(InvariantBroken, match=message):
        run(worker, step_of(StepPlan(1, sync_loads=(load_of(1),))), 2)


def test_where_nothing_ends_a_step_the_next_one_stops_the_engine(worker: Worker) -> None:
    worker.names = []
    worker.v1(step_of(StepPlan(1, sync_loads=(load_of(1),))), 2, defers=True)
    with pytest.raises(InvariantBroken, match="did not wait for load 1 in 3 of 3 layers"):
        worker.v1(step_of(StepPlan(2)), 2, defers=True)


def test_the_error_of_a_forward_is_not_hidden_by_the_layers_behind_it(worker: Worker) -> None:
    worker.names, worker.error = NAMES[:1], MemoryError("of the forward")
    with pytest.raises(MemoryError, match="of the forward"):
        worker.v1(step_of(StepPlan(1, sync_loads=(load_of(1),))), 2)


@runners
def test_a_load_that_fails_stops_the_forward_before_the_layer(worker: Worker, run: Run) -> None:
    message = (
        r"worker 0: layer model\.layers\.0\.self_attn\.attn needs load 1, 2: it failed: .*"
        "is not below.*; the step cannot be computed without it"
    )
    plan = StepPlan(1, sync_loads=(load_of(1), load_of(2, block=NUM_BLOCKS)))
    with pytest.raises(LayerLoadFailed, match=message):
        run(worker, step_of(plan), 2)
    assert worker.seen == []


def test_whole_graphs_are_given_up_for_layers_that_wait_alone() -> None:
    assert HiCacheConnector.requires_piecewise_for_cudagraph(EXTRA)
    assert not HiCacheConnector.requires_piecewise_for_cudagraph({})


def with_graphs(mode: CUDAGraphMode) -> SimpleNamespace:
    return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_graphs_of_the_whole_model_are_refused(mode: CUDAGraphMode) -> None:
    message = f'load_mode must be "async" with cudagraph_mode {mode.name}, got "layerwise"'
    with pytest.raises(ConfigError, match=message):
        check_worker_pools(with_graphs(mode), [None])
    for allowed in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE):
        check_worker_pools(with_graphs(allowed), [None])
