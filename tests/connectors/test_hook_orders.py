"""Both orders in which vLLM's model runners call a worker's connector, by vLLM's own code.

A step's forward writes its number into the device block of that number, its drafter writes beside.
Copies end before the hook that starts them does: one that starts too early has the wrong numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from vllm_hicache.connectors.hicache import HiCacheConnector
from vllm_hicache.connectors.messages import PlanMetadata
from vllm_hicache.host_pool import HostPool
from vllm_hicache.plan import CopyOp, Direction, StepPlan
from vllm_hicache.progress_board import ProgressBoard
from vllm_hicache.transfer import CopyEngine

pytestmark = pytest.mark.vllm

NUM_BLOCKS = NUM_SLOTS = 8
TARGET, DRAFT = 0, 1
"""Places of a block and of a slot: what the forward writes, and what the drafter writes."""


@dataclass
class Device:
    """Blocks, and what happened to them, in order. A copy has the number of its block and slot."""

    blocks: torch.Tensor = field(default_factory=lambda: torch.zeros(NUM_BLOCKS, 2).long())
    events: list[str] = field(default_factory=list)

    def forward(self, step: int) -> None:
        self.events.append(f"forward {step}")
        self.blocks[step, TARGET] = step

    def draft(self, step: int) -> None:
        self.events.append(f"draft {step}")
        self.blocks[step, DRAFT] = step

    def save(self, copies: Sequence[np.ndarray], host: Sequence[torch.Tensor]) -> None:
        number = int(copies[0][0, 0])
        self.events.append(f"save {number}")
        host[0].view(torch.int64)[number] = self.blocks[number]

    def load(self, copies: Sequence[np.ndarray], host: Sequence[torch.Tensor]) -> None:
        number = int(copies[0][0, 0])
        self.events.append(f"load {number}")
        self.blocks[number] = host[0].view(torch.int64)[number]


class HastyEngine(CopyEngine):
    """Every copy ends at once, as on the fastest of all links; fences are told."""

    device_state: Device

    def fence(self) -> torch.cuda.Event | None:
        self.device_state.events.append("fence")
        return super().fence()

    def submit(self, direction: Direction, op_id: int, *arguments: Any) -> None:
        super().submit(direction, op_id, *arguments)
        assert self.wait(direction, op_id, 10)


@dataclass
class Worker:
    """A worker's connector over a device of known numbers, and vLLM's ways to run a step on it."""

    connector: HiCacheConnector
    device: Device
    config: VllmConfig
    outputs: list[KVConnectorOutput] = field(default_factory=list)

    @property
    def host(self) -> torch.Tensor:
        """What each slot holds of the target and of the drafter."""
        assert self.connector.worker_side.pool is not None
        return self.connector.worker_side.pool.tensors[0].view(torch.int64)

    def v1(self, output: SchedulerOutput, step: int) -> None:
        """The V1 runner without speculation."""
        self._forward_v1(output, step, defers=False)

    def v1_speculating(self, output: SchedulerOutput, step: int) -> None:
        """It reports before it drafts, and ends the step after that."""
        self._forward_v1(output, step, defers=True)
        self.device.draft(step)
        KVConnectorModelRunnerMixin.finalize_kv_connector()

    def v1_unfinished(self, output: SchedulerOutput, step: int) -> None:
        """The same on a stage that has no drafter: nothing ever ends the step."""
        self._forward_v1(output, step, defers=True)

    def v1_empty(self, output: SchedulerOutput) -> None:
        self.connector.handle_preemptions(output.kv_connector_metadata)
        done = KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config)
        self._keep(done.kv_connector_output)

    def _forward_v1(self, output: SchedulerOutput, step: int, *, defers: bool) -> None:
        self.connector.handle_preemptions(output.kv_connector_metadata)
        hooks = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output, defers)
        with set_forward_context(None, self.config), hooks as said:
            self.device.forward(step)
        self._keep(said)

    def v2(self, output: SchedulerOutput, step: int) -> None:
        """The V2 runner: one end of the step, behind sampling."""
        runner = self._runner()
        with set_forward_context(None, self.config):
            runner.pre_forward(output)
            self.device.forward(step)
        runner.finish_forward()
        self._keep(runner.post_forward(set()))

    def v2_speculating(self, output: SchedulerOutput, step: int) -> None:
        """It drafts before it reports."""
        runner = self._runner()
        with set_forward_context(None, self.config):
            runner.pre_forward(output)
            self.device.forward(step)
        runner.finish_forward()
        self.device.draft(step)
        self._keep(runner.post_forward(set()))

    def v2_empty(self, output: SchedulerOutput) -> None:
        self._keep(self._runner().no_forward(output).kv_connector_output)

    def _runner(self) -> ActiveKVConnector:
        """The V2 runner's half, without the registration of a KV cache, which is missing here."""
        runner = object.__new__(ActiveKVConnector)
        runner.vllm_config, runner.kv_connector = self.config, self.connector
        runner._pending_load_kwargs, runner._disabled = None, False
        return runner

    def _keep(self, said: KVConnectorOutput | None) -> None:
        assert said is not None
        self.outputs.append(said)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    config = VllmConfig(
        kv_transfer_config=KVTransferConfig(
            kv_connector="HiCacheConnector",
            kv_connector_module_path="vllm_hicache.connectors.hicache",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        )
    )
    connector = HiCacheConnector(config, KVConnectorRole.WORKER, None)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    side, device = connector.worker_side, Device()
    side.pool, side._board = HostPool(NUM_SLOTS, [16]), ProgressBoard()
    side.engine = HastyEngine(device, side.pool, publish=side._publish, device=torch.device("cpu"))
    side.engine.device_state = device
    board = side._board
    yield Worker(connector, device, config)
    connector.shutdown()
    board.close()


Run = Callable[[Worker, SchedulerOutput, int], None]
RUNNERS: dict[str, tuple[Run, Callable[[Worker, SchedulerOutput], None]]] = {
    "V1": (Worker.v1, Worker.v1_empty),
    "V1 speculating": (Worker.v1_speculating, Worker.v1_empty),
    "V1 without an end": (Worker.v1_unfinished, Worker.v1_empty),
    "V2": (Worker.v2, Worker.v2_empty),
    "V2 speculating": (Worker.v2_speculating, Worker.v2_empty),
}
runners = pytest.mark.parametrize("name", RUNNERS)


def copy_of(number: int) -> CopyOp:
    return CopyOp(number, np.array([[number, 0, number, 0]], dtype=np.int32))


def step_of(plan: StepPlan) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = PlanMetadata(plan)
    output.has_sync_kv_loads = bool(plan.sync_loads)
    return output


def run(worker: Worker, name: str, plans: Sequence[StepPlan], *, ends: bool = True) -> None:
    """Steps with a forward and, at last, the empty one that vLLM runs before it is idle."""
    with_forward, empty = RUNNERS[name]
    for plan in plans:
        with_forward(worker, step_of(plan), plan.number)
    if ends:
        empty(worker, step_of(StepPlan(plans[-1].number + 1)))


def saves_of(*steps: int) -> list[StepPlan]:
    """Plans in which each of these steps saves the block that it writes."""
    return [
        StepPlan(step, saves=(copy_of(step),) if step in steps else ())
        for step in range(1, max(steps) + 1)
    ]


ONE_SAVE = {
    "V1": ["forward 1", "fence", "save 1", "forward 2"],
    "V1 speculating": ["forward 1", "draft 1", "fence", "save 1", "forward 2", "draft 2"],
    "V1 without an end": ["forward 1", "fence", "save 1", "forward 2"],
    "V2": ["forward 1", "fence", "save 1", "forward 2"],
    "V2 speculating": ["forward 1", "draft 1", "fence", "save 1", "forward 2", "draft 2"],
}


@runners
def test_a_save_starts_behind_its_own_forward_and_drafter_and_before_the_next(
    worker: Worker, name: str
) -> None:
    run(worker, name, [StepPlan(1, saves=(copy_of(1),)), StepPlan(2)])
    assert worker.device.events == ONE_SAVE[name]


@runners
def test_every_save_has_what_its_step_wrote_and_none_is_lost(worker: Worker, name: str) -> None:
    run(worker, name, saves_of(1, 2, 3, 5))
    drafts = [0, 1, 2, 3, 0, 5, 0, 0] if "speculating" in name else [0] * NUM_SLOTS
    assert worker.host[:, TARGET].tolist() == [0, 1, 2, 3, 0, 5, 0, 0]
    assert worker.host[:, DRAFT].tolist() == drafts
    saves = [event for event in worker.device.events if event.startswith("save")]
    assert saves == ["save 1", "save 2", "save 3", "save 5"]


@runners
def test_the_save_of_the_last_step_waits_for_no_other_forward(worker: Worker, name: str) -> None:
    run(worker, name, saves_of(3), ends=False)
    is_early = name != "V1 without an end"
    assert worker.host[3, TARGET] == (3 if is_early else 0)
    RUNNERS[name][1](worker, step_of(StepPlan(4)))
    assert worker.host[3, TARGET] == 3
    assert worker.device.events.count("save 3") == 1


@runners
@pytest.mark.parametrize("is_sync", [True, False], ids=["synchronous", "asynchronous"])
def test_loads_of_a_step_precede_its_forward_and_saves_follow_it(
    worker: Worker, name: str, is_sync: bool
) -> None:
    worker.host[7] = torch.tensor([70, 71])
    load = (copy_of(7),)
    loads = {"sync_loads": load} if is_sync else {"loads": load}
    run(worker, name, [StepPlan(1, saves=(copy_of(1),), **loads), StepPlan(2)])
    assert worker.device.events == ["fence", "load 7", *ONE_SAVE[name]]
    assert worker.device.blocks[7].tolist() == [70, 71]


@runners
def test_a_load_waits_until_the_save_of_the_step_before_has_read_the_block(
    worker: Worker, name: str
) -> None:
    """Block 1 is saved by one step and filled by the next, which is its new owner."""
    fill = CopyOp(1, np.array([[1, 0, 1, 0]], dtype=np.int32))
    run(worker, name, [StepPlan(1, saves=(copy_of(1),)), StepPlan(2, loads=(fill,))])
    events = worker.device.events
    assert events.index("save 1") < events.index("load 1") < events.index("forward 2")
    assert worker.host[1, TARGET] == 1


@runners
def test_each_step_is_reported_once_with_its_own_failures(worker: Worker, name: str) -> None:
    plans = [
        StepPlan(1, failed_requests=("a", "b")),
        StepPlan(2),
        StepPlan(3, failed_requests=("c",)),
    ]
    run(worker, name, plans)
    assert [said.failed_recving for said in worker.outputs] == [{"a", "b"}, set(), {"c"}, set()]
    reports = [said.kv_connector_worker_meta for said in worker.outputs]
    assert [report.plan_number for report in reports] == [1, 2, 3, 4]


@runners
def test_a_report_never_tells_a_save_that_has_not_started(worker: Worker, name: str) -> None:
    """Where the report comes before the save starts, the next step's tells it."""
    run(worker, name, saves_of(1, 2, 3))
    told = [said.kv_connector_worker_meta.progress[0].saves_done for said in worker.outputs]
    is_late = name in ("V1 speculating", "V1 without an end")
    assert told == ([0, 1, 2, 3] if is_late else [1, 2, 3, 3])


@runners
def test_a_plan_that_comes_again_is_neither_executed_nor_reported_again(
    worker: Worker, name: str
) -> None:
    worker.host[7] = 70
    plan = StepPlan(1, loads=(copy_of(7),), saves=(copy_of(1),), failed_requests=("a",))
    run(worker, name, [plan, plan])
    events = worker.device.events
    assert [events.count(copy) for copy in ("load 7", "save 1")] == [1, 1]
    assert [said.failed_recving for said in worker.outputs] == [{"a"}, set(), set()]


@pytest.mark.parametrize("empty", [Worker.v1_empty, Worker.v2_empty], ids=["V1", "V2"])
def test_a_step_without_a_forward_loads_saves_and_reports(
    worker: Worker, empty: Callable[[Worker, SchedulerOutput], None]
) -> None:
    worker.host[7] = 70
    plan = StepPlan(1, loads=(copy_of(7),), saves=(copy_of(1),), failed_requests=("a",))
    empty(worker, step_of(plan))
    assert worker.device.events == ["fence", "load 7", "fence", "save 1"]
    assert worker.outputs[0].failed_recving == {"a"}
    assert not worker.connector.has_connector_metadata()
