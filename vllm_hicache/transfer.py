"""Runs numbered device copies in order, one thread per direction, and publishes each completion.

An operation is published when its bytes are in place; nobody waits here unless it asks to.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.host_pool import HostPool
from vllm_hicache.layered_loads import LayeredLoads, LoadSpans
from vllm_hicache.tiers import Direction

logger = logging.getLogger(__name__)


Publish = Callable[[Direction, int, bool, float], None]
Copies = tuple[np.ndarray, ...]
"""One list per KV cache group: [n, 4] int32 rows (host slot, granule in page, block id, granule in
block)."""


class Copier(Protocol):
    """Copies listed granules; on a CUDA device it only enqueues, on the current stream.

    copies  one list per KV cache group
    host    one region of host slots per pool
    """

    def save(self, copies: Copies, host: tuple[torch.Tensor, ...]) -> None:
        """Copy from device blocks to host slots."""

    def load(self, copies: Copies, host: tuple[torch.Tensor, ...]) -> None:
        """Copy from host slots to device blocks."""


class CopyEngine:
    """Copies between device blocks and host slots, in order within each direction.

    ``publish(direction, op_id, ok, seconds)`` is called in that order, from the direction's thread,
    once nothing touches the operation's blocks and slots any more; a failed copy is published with
    ``ok`` False in its place. It must be quick, must not raise and must not call the engine.
    ``seconds`` are those of the copy alone: without other copies of its direction before it, and
    without the forward that its fence waits for.
    """

    def __init__(
        self, copier: Copier, pool: HostPool, *, publish: Publish, device: torch.device
    ) -> None:
        self._device = device
        self._copy = {
            Direction.SAVE: partial(copier.save, host=pool.tensors),
            Direction.LOAD: partial(copier.load, host=pool.tensors),
        }
        self._lanes = {
            direction: _Lane(partial(publish, direction), device, direction)
            for direction in (Direction.SAVE, Direction.LOAD)
        }
        if device.type == "cpu" and torch.get_num_threads() > 1:
            # The lanes run torch on one core each, and torch takes the last setting of any thread
            # as the default of new threads. This gives new threads the caller's setting again.
            torch.set_num_threads(torch.get_num_threads())

    def fence(self) -> torch.cuda.Event | None:
        """Mark the work enqueued so far on the current stream; None on a CPU, where it is done."""
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def submit(
        self,
        direction: Direction,
        op_id: int,
        copies: Copies,
        fence: torch.cuda.Event | None = None,
    ) -> None:
        """Enqueue a copy that starts after ``fence``; never blocks. Empty lists are published too.

        copies  now ours
        op_id   ascends within a direction, gaps allowed
        """
        copy = partial(self._copy[direction], copies)
        operation = _Operation((op_id,), copy, sum(map(len, copies)), fence)
        self._lanes[direction].submit(operation)

    def submit_layered(
        self, loads: LayeredLoads, load_spans: LoadSpans, fence: torch.cuda.Event | None = None
    ) -> None:
        """The same for the loads of a step, which start as one; each is published when the last
        span of all has been copied, as failed when any span of any failed."""
        run = partial(loads.run, load_spans)
        operation = _Operation(loads.op_ids, run, loads.num_granules, fence)
        self._lanes[Direction.LOAD].submit(operation)

    def wait(self, direction: Direction, op_id: int, timeout_s: float) -> bool:
        """Wait until all submitted operations up to ``op_id`` are published; False: not in time."""
        return self._lanes[direction].wait(op_id, timeout_s)

    def make_current_stream_wait(self, op_id: int, timeout_s: float) -> bool:
        """Order what the caller enqueues next after the load ``op_id``; False: not in time.

        Waits only until the load is enqueued on the device; on a CPU until it is done. A failed
        load counts as done: it is published as failed.
        """
        return self._lanes[Direction.LOAD].make_current_stream_wait(op_id, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish what was submitted within the time, drop the rest; nothing is published later.

        False when a copy still runs: its blocks and the pool must stay mapped.
        """
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.stop()
        is_idle = [lane.join(deadline) for lane in self._lanes.values()]
        return all(is_idle)


@dataclass(frozen=True, slots=True)
class _Operation:
    """Copies that run as one. ``op_ids`` ascend; ``run`` enqueues them on the current stream, or
    on a CPU makes them."""

    op_ids: tuple[int, ...]
    run: Callable[[], None]
    num_granules: int
    fence: torch.cuda.Event | None


class _Lane:
    """One direction: a queue, a thread and, on a CUDA device, a stream."""

    def __init__(
        self,
        publish: Callable[[int, bool, float], None],
        device: torch.device,
        direction: Direction,
    ) -> None:
        self._publish = publish
        self._device = device
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device, priority=-1)
        self._queue: SimpleQueue[_Operation | None] = SimpleQueue()
        self._changed = threading.Condition()  # guards what follows
        self._outstanding: deque[int] = deque()  # ids, the running one first
        self._enqueued: torch.cuda.Event | None = None  # end of the running one, on the device
        self._last_id = -1
        self._is_stopped = False
        self._is_abandoned = False
        self._thread = threading.Thread(
            target=self._serve, name=f"hicache-{direction.value}", daemon=True
        )
        self._is_ready = threading.Event()
        self._thread.start()
        self._is_ready.wait()

    def submit(self, operation: _Operation) -> None:
        with self._changed:
            for op_id in operation.op_ids:
                if self._is_stopped:
                    raise InvariantBroken(f"copy {op_id} was submitted after close")
                if op_id <= self._last_id:
                    raise InvariantBroken(f"copy {op_id} came after copy {self._last_id}")
                self._last_id = op_id
                self._outstanding.append(op_id)
            self._queue.put(operation)

    def wait(self, op_id: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(partial(self._is_done, op_id), timeout_s)

    def make_current_stream_wait(self, op_id: int, timeout_s: float) -> bool:
        with self._changed:
            if not self._changed.wait_for(partial(self._is_enqueued, op_id), timeout_s):
                return False
            event = None if self._is_done(op_id) else self._enqueued
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return True

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._queue.put(None)

    def join(self, deadline: float) -> bool:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._is_abandoned = self._thread.is_alive()
            return not self._is_abandoned

    def _is_done(self, op_id: int) -> bool:
        return not self._outstanding or self._outstanding[0] > op_id

    def _is_enqueued(self, op_id: int) -> bool:
        is_running = self._enqueued is not None and self._outstanding[0] == op_id
        return is_running or self._is_done(op_id)

    def _serve(self) -> None:
        if self._stream is None and torch.get_num_threads() > 1:
            # One core a lane: a team of threads would fight with the forward's for every core.
            torch.set_num_threads(1)
        self._is_ready.set()
        # vLLM makes its KV buffer in inference mode; only in that mode may it be written.
        with torch.inference_mode():
            while (operation := self._queue.get()) is not None:
                seconds = None if self._is_abandoned else self._attempt(operation)
                self._finish(operation.op_ids, seconds)

    def _finish(self, op_ids: tuple[int, ...], seconds: float | None) -> None:
        ok, seconds = seconds is not None, seconds or 0.0
        with self._changed:
            for op_id in op_ids:
                if not self._is_abandoned:
                    self._publish(op_id, ok, seconds)
                seconds = 0.0  # those that run as one took it together
                self._outstanding.popleft()
            self._enqueued = None
            self._changed.notify_all()

    def _attempt(self, operation: _Operation) -> float | None:
        """Copy, wait for the end and return the seconds of the copy; None where it failed. Then,
        too, nothing of the operation still runs."""
        try:
            if self._stream is not None:
                return self._copy_on_stream(operation, self._stream)
            started = time.monotonic()
            operation.run()
            return time.monotonic() - started
        except Exception:
            shown = ", ".join(map(str, operation.op_ids))
            logger.exception("Copy %s of %d granules failed", shown, operation.num_granules)
            self._settle()
            return None

    def _copy_on_stream(self, operation: _Operation, stream: torch.cuda.Stream) -> float:
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            if operation.fence is not None:
                stream.wait_event(operation.fence)
            start = torch.cuda.Event(enable_timing=True)
            start.record(stream)  # reached by the device when the forward before is done
            operation.run()
            # Waiting for it sleeps instead of spinning on a core.
            end = torch.cuda.Event(enable_timing=True, blocking=True)
            end.record(stream)
        with self._changed:
            self._enqueued = end
            self._changed.notify_all()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def _settle(self) -> None:
        """Wait for what a failed copy may have left running on any stream of the device."""
        if self._stream is None:
            return
        try:
            torch.cuda.synchronize(self._device)
        except Exception:
            logger.exception("The device does not answer after a failed copy")
