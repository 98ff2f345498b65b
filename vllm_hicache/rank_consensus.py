"""The checker that names the first place where workers diverge. Lives beside the planner.

It takes the events that workers send with their reports, compares them stream by stream, and
tells, raises or ends the process. It never waits: what not every worker has done is compared later.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_hicache.checked_calls import checked, recorded
from vllm_hicache.errors import RankDivergence
from vllm_hicache.metrics import Metrics
from vllm_hicache.plan import StepPlan
from vllm_hicache.rank_events import Event, EventBatch, EventRecorder, unpack_batch
from vllm_hicache.rank_places import WorkerPlace
from vllm_hicache.rank_report import (
    divergence_record,
    divergence_text,
    participants,
    write_dump,
)
from vllm_hicache.rank_stall import Stall, WorkerSigns, stall_text
from vllm_hicache.rank_streams import Divergence, StreamJoin

logger = logging.getLogger(__name__)

EXIT_STATUS = 70
"""Of an engine that the mode ``abort`` ended: an internal software error in ``sysexits.h``."""
PLANS = "plans"
"""The stream in which the scheduler takes part, too."""

check_plan = checked(
    stream=PLANS,
    step="plan.number",
    in_step=True,
    key="plan.number",
    arguments=("plan.sync_loads", "plan.loads", "plan.saves", "plan.failed_requests"),
)
"""A plan as sent and as received: the rows of every copy, by digest."""


@dataclass(frozen=True, slots=True)
class ConsensusOptions:
    """See the options ``rank_consensus*``."""

    mode: str
    num_events: int
    folder: str | None


class SentPlans:
    """The scheduler's own event for each plan: what every worker should have received."""

    @check_plan
    def bind(self, plan: StepPlan) -> None:
        """The plan goes to all workers."""


def stop_process() -> None:
    """End this process now, whatever its threads wait for; workers end with it."""
    os._exit(EXIT_STATUS)


class RankConsensus:
    """Compares what the workers of one engine did; see ``StreamJoin`` for how.

    ``absorb`` and ``sent`` belong to the scheduler's thread; ``report_stall`` to any other.
    """

    def __init__(
        self,
        options: ConsensusOptions,
        places: Sequence[WorkerPlace],
        metrics: Metrics,
        *,
        stop: Callable[[], None] = stop_process,
    ) -> None:
        self._options = options
        self._metrics = metrics
        self._stop = stop
        self._names = participants(places)
        self._num_workers = len(places)
        self.decisions = EventRecorder()
        """What the scheduler decided; kept for the file, there is nobody to compare it with."""
        self._plans = EventRecorder()
        self._send = recorded(SentPlans().bind, self._plans)
        self._streams = {PLANS: StreamJoin(PLANS, self._num_workers, has_reference=True)}
        self._is_level = True
        """Whether nothing that a worker did waits to be compared."""
        self._numbers = [0] * self._num_workers
        self._told: dict[int, int] = {}
        self._silent: set[int] = set()
        self._known: set[tuple[str, str]] = set()
        self._histories: list[deque[Event]] = [
            deque(maxlen=options.num_events) for _ in self._names
        ]
        self._lock = threading.Lock()  # guards the histories and the stalls
        self._stalls: list[str] = []

    def sent(self, plan: StepPlan) -> None:
        """The scheduler hands out a plan."""
        self._send(plan)
        self.decisions.step = plan.number + 1  # what is decided from now on is for the next step

    def absorb(self, packed: Mapping[int, bytes], heard: Collection[int]) -> None:
        """Take the packed batches of a step's reports and judge what can be judged.

        ``heard`` are the workers that reported; one without events does not take part.
        Raises RankDivergence in the mode ``raise``, also for a stall that was found before.
        """
        if len(packed) < len(heard):
            for worker_id in heard:
                if worker_id not in packed and worker_id not in self._silent:
                    self._exclude(worker_id)
        sent = self._plans.take()
        self._streams[PLANS].add(self._num_workers, sent)
        with self._lock:
            self._histories[-1].extend(self.decisions.take())
            self._histories[-1].extend(sent)
            if not self._absorb_equal(packed):
                for worker_id, batch in packed.items():
                    self._absorb_batch(worker_id, unpack_batch(batch))
        if not self._is_level:
            self._judge()
        if self._stalls:
            self._settle_stalls()

    def _absorb_equal(self, packed: Mapping[int, bytes]) -> bool:
        """Nearly always: all workers did the same since their last reports, and nothing waits.
        Then one of them is looked at. False where it is not so; nothing has changed then."""
        first = next(iter(packed.values()), b"")
        if not self._is_level or len(packed) != self._num_workers:
            return False
        if any(batch != first for batch in packed.values()):
            return False
        batch = unpack_batch(first)
        if any(number + 1 != batch.number for number in self._numbers):
            return False
        if not self._streams[PLANS].agree([e for e in batch.events if e.stream == PLANS]):
            return False
        for worker_id in packed:
            self._numbers[worker_id] = batch.number
            self._told[worker_id] = batch.step
            self._histories[worker_id].extend(batch.events)
        return True

    def _absorb_batch(self, worker_id: int, batch: EventBatch) -> None:
        if worker_id in self._silent or not self._is_next(worker_id, batch):
            return
        self._is_level = False
        self._histories[worker_id].extend(batch.events)
        for event in batch.events:
            self._stream(event.stream).add(worker_id, (event,))

    def _judge(self) -> None:
        streams = self._streams.values()
        found = [d for stream in streams for d in stream.compare(self._told)]
        self._is_level = all(stream.is_level for stream in streams)
        if found:
            self._report(sorted(found, key=lambda divergence: divergence.step))

    def _stream(self, name: str) -> StreamJoin:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = StreamJoin(name, self._num_workers)
            for worker_id in self._silent:
                stream.leave(worker_id)
        return stream

    def _is_next(self, worker_id: int, batch: EventBatch) -> bool:
        """Whether the batch is new. Where one before it was lost, all streams start again."""
        expected = self._numbers[worker_id] + 1
        if batch.number < expected:
            return False
        self._numbers[worker_id] = batch.number
        self._told[worker_id] = batch.step
        if batch.number > expected:
            logger.warning(
                "HiCache rank consensus: a report of %s was lost; compared again from step %d",
                self._names[worker_id],
                batch.step + 1,
            )
            for stream in self._streams.values():
                stream.restart(batch.step)
        return True

    def _exclude(self, worker_id: int) -> None:
        logger.warning(
            "HiCache rank consensus: %s sends no events and is not compared; is rank_consensus on "
            "there, too?",
            self._names[worker_id],
        )
        self._silent.add(worker_id)
        for stream in self._streams.values():
            stream.leave(worker_id)

    # What is found -------------------------------------------------------------------------------

    def _report(self, found: list[Divergence]) -> None:
        """Tell the first of each class and call in full; the others are counted."""
        new = []
        for divergence in found:
            self._metrics.count("rank_divergences", 1, divergence.kind)
            if (divergence.kind, divergence.call) not in self._known:
                self._known.add((divergence.kind, divergence.call))
                new.append(divergence)
        for divergence in new:
            record = divergence_record(divergence, self._names)
            self._log(divergence_text(divergence, self._names), record)
        first = divergence_text(found[0], self._names).partition("\n")[0]
        if self._options.mode == "raise":
            raise RankDivergence(first)
        if self._options.mode == "abort":
            self._end_process()

    def report_stall(self, stall: Stall, signs: Mapping[int, WorkerSigns]) -> None:
        """Tell of workers that stopped; the scheduler's thread may wait for them and hang."""
        text = stall_text(stall, self._names, signs)
        self._log(
            text,
            {
                "class": "stall",
                "step": stall.step,
                "stopped": [self._names[i] for i in stall.workers],
                "why": stall.why,
                "signs": {self._names[i]: sign._asdict() for i, sign in signs.items()},
            },
        )
        if self._options.mode == "abort":
            self._end_process()
        with self._lock:
            self._stalls.append(text.partition("\n")[0])

    def _settle_stalls(self) -> None:
        with self._lock:
            stalls, self._stalls = self._stalls, []
        self._metrics.count("rank_divergences", len(stalls), "stall")
        if self._options.mode == "raise":
            raise RankDivergence(stalls[0])

    def _log(self, text: str, record: dict[str, Any]) -> None:
        with self._lock:
            self._histories[-1].extend(self.decisions.take())
            histories = [
                (name, list(h)) for name, h in zip(self._names, self._histories, strict=True)
            ]
        options = asdict(self._options)
        try:
            path = write_dump(self._options.folder, record | {"options": options}, histories)
            where = f"  last events of all: {path}"
        except OSError as error:
            where = f"  last events of all: not written, {error}"
        logger.error("%s\n%s", text, where)

    def _end_process(self) -> None:
        logger.critical("HiCache rank consensus ends this engine: rank_consensus is abort")
        for handler in (*logging.getLogger("vllm_hicache").handlers, *logging.getLogger().handlers):
            handler.flush()
        self._stop()
