"""Puts the rank-consensus checker onto the two sides of a connector; off, nothing of it exists."""

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_hicache.checked_calls import watch
from vllm_hicache.checked_decisions import decision_makers
from vllm_hicache.connectors.messages import ReportMetadata
from vllm_hicache.metrics import Metrics
from vllm_hicache.plan import StepPlan
from vllm_hicache.planner import Planner
from vllm_hicache.progress_board import GOODBYE, BoardReader, ProgressBoard
from vllm_hicache.rank_consensus import ConsensusOptions, RankConsensus
from vllm_hicache.rank_events import EventRecorder, pack_batch
from vllm_hicache.rank_places import places
from vllm_hicache.rank_stall import StallWatch, WorkerSigns

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

    from vllm_hicache.config import HiCacheConfig

logger = logging.getLogger(__name__)

LOOKS_PER_DEADLINE = 8
MAX_LOOK_S = 1.0
OFF = "off"


def look_interval_s(config: "HiCacheConfig") -> float:
    """Time between two signs of life, and between two looks at them."""
    return min(MAX_LOOK_S, config.rank_consensus_stall_s / LOOKS_PER_DEADLINE)


class WorkerChecks:
    """One worker's part: records its calls, and leaves signs of life on its board."""

    def __init__(self, side: object, interval_s: float) -> None:
        self._recorder = EventRecorder()
        self._interval_s = interval_s
        self._board: ProgressBoard | None = None
        self._is_closed = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="hicache-pulse", daemon=True)
        watch(side, self._recorder)

    @classmethod
    def create(cls, config: "HiCacheConfig", side: object) -> "WorkerChecks | None":
        """None where the checker is off."""
        if config.rank_consensus == OFF:
            return None
        return cls(side, look_interval_s(config))

    def start(self, board: ProgressBoard) -> None:
        self._board = board
        self._pulse.start()

    def begin_step(self, number: int) -> None:
        if self._board is not None:
            self._board.begin_step(number)

    def end_step(self) -> bytes:
        """The packed batch that goes with the step's report."""
        batch = pack_batch(self._recorder.take_batch())
        if self._board is not None:
            self._board.end_step(self._recorder.step)
        return batch

    def _beat(self) -> None:
        while self._board is not None and not self._is_closed.wait(self._interval_s):
            self._board.beat()

    def close(self) -> None:
        self._is_closed.set()
        if self._board is not None:
            self._pulse.join()
            self._board.say_goodbye()


class SchedulerChecks:
    """The scheduler's part: compares what comes with reports, and watches boards for stalls."""

    def __init__(
        self, consensus: RankConsensus, watch: StallWatch, boards: Mapping[int, BoardReader]
    ) -> None:
        self.consensus = consensus
        self._watch = watch
        self._boards = boards
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def create(
        cls,
        config: "HiCacheConfig",
        parallel: "ParallelConfig",
        boards: Mapping[int, BoardReader],
        planner: Planner,
        metrics: Metrics,
    ) -> "SchedulerChecks | None":
        """None where the checker is off."""
        if config.rank_consensus == OFF:
            return None
        everyone = places(
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
        )
        options = ConsensusOptions(
            mode=config.rank_consensus,
            num_events=config.rank_consensus_events,
            folder=config.rank_consensus_folder,
        )
        consensus = RankConsensus(options, everyone, metrics)
        for owner in decision_makers(planner):
            watch(owner, consensus.decisions)
        checks = cls(consensus, StallWatch(everyone, config.rank_consensus_stall_s), boards)
        checks.start(look_interval_s(config))
        logger.warning(
            "HiCache rank consensus is on (%s): %d workers are compared, stalls named after %g s",
            config.rank_consensus,
            len(everyone),
            config.rank_consensus_stall_s,
        )
        return checks

    def sent(self, plan: StepPlan) -> None:
        self.consensus.sent(plan)

    def absorb(self, report: ReportMetadata) -> None:
        """Raises RankDivergence in the mode ``raise``."""
        self.consensus.absorb(report.events or {}, report.progress)

    def start(self, interval_s: float) -> None:
        self._thread = threading.Thread(
            target=self._look, args=(interval_s,), name="hicache-stalls", daemon=True
        )
        self._thread.start()

    def _look(self, interval_s: float) -> None:
        try:
            while not self._is_closed.wait(interval_s):
                self._look_once()
        except Exception:
            logger.exception("HiCache rank consensus: stalls are not watched any more")

    def _look_once(self) -> None:
        everyone = {i: WorkerSigns(*board.signs()) for i, board in self._boards.items()}
        signs = {i: sign for i, sign in everyone.items() if sign.pulse != GOODBYE}
        stall = self._watch.look(signs, time.monotonic())
        if stall is not None:
            self.consensus.report_stall(stall, signs)

    def close(self) -> None:
        """Before the boards are closed."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()
