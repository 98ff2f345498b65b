"""A coroutine leaves its jobs only when none of them touches its buffers."""

import asyncio
import gc
import threading
import time
import weakref

import pytest

from vllm_hicache.errors import BackendTimeout, BackendUnavailable
from vllm_hicache.storage_backends.io_threads import IoThreads


class Hung:
    """A job that hangs until it is let go, as in a system call that does not return."""

    def __init__(self):
        self.started = threading.Event()
        self.go = threading.Event()

    def __call__(self, batch):
        self.started.set()
        self.go.wait()
        return batch.abandoned


@pytest.fixture
async def threads():
    pool = IoThreads("test", 2, hung_after_s=0.02)
    yield pool
    await pool.close()


async def started(*jobs):
    while not all(job.started.is_set() for job in jobs):
        await asyncio.sleep(0.001)


async def test_results_come_in_order_of_jobs(threads):
    def job(number):
        return lambda _batch: (time.sleep(0.002 if number % 2 else 0), number)[1]

    assert await threads.run([job(n) for n in range(20)], timeout_s=1) == list(range(20))
    assert await threads.run([], timeout_s=1) == []


async def test_deadline_does_not_return_while_a_job_runs(threads):
    hung = Hung()
    call = asyncio.ensure_future(threads.run([hung], timeout_s=0.01))
    await asyncio.sleep(0.04)
    assert not call.done()
    hung.go.set()
    with pytest.raises(BackendTimeout):
        await call


async def test_call_behind_hung_threads_gets_a_new_thread_long_before_any_deadline(threads):
    hung = [Hung(), Hung()]
    stuck = asyncio.ensure_future(threads.run(hung, timeout_s=60))
    await started(*hung)
    began = time.monotonic()
    assert await threads.run([lambda _batch: "read"], timeout_s=60) == ["read"]
    assert time.monotonic() - began < 10
    for job in hung:
        job.go.set()
    await stuck


async def test_deadline_returns_at_once_when_no_buffers_are_used(threads):
    hung = Hung()
    with pytest.raises(BackendTimeout):
        await threads.run([hung], timeout_s=0.01, uses_buffers=False)
    assert threads.oldest_running_s() > 0
    hung.go.set()


async def test_cancellation_waits_for_running_jobs_however_often_it_is_repeated(threads):
    hung = Hung()
    call = asyncio.ensure_future(threads.run([hung], timeout_s=None))
    await started(hung)
    for _ in range(3):
        call.cancel()
        await asyncio.sleep(0.002)
        assert not call.done()
    hung.go.set()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_cancellation_while_leaving_at_the_deadline_is_not_lost(threads):
    hung = Hung()
    call = asyncio.ensure_future(threads.run([hung], timeout_s=0.005))
    await asyncio.sleep(0.02)
    call.cancel()
    hung.go.set()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_jobs_that_have_not_started_are_dropped_at_the_deadline():
    threads = IoThreads("test", 1, hung_after_s=10)
    hung = Hung()
    running = asyncio.ensure_future(threads.run([hung], timeout_s=None))
    await started(hung)
    buffer = memoryview(bytearray(8))
    ran = []
    with pytest.raises(BackendTimeout):
        await threads.run([lambda _batch, b=buffer: ran.append(b)] * 3, timeout_s=0.005)
    hung.go.set()
    await running
    await threads.run([lambda _batch: None], timeout_s=1)
    assert ran == []
    await threads.close()


async def test_running_job_learns_that_nobody_waits(threads):
    hung = Hung()
    seen = []
    call = asyncio.ensure_future(
        threads.run([lambda batch: seen.append(hung(batch))], timeout_s=0.005)
    )
    await asyncio.sleep(0.02)
    hung.go.set()
    with pytest.raises(BackendTimeout):
        await call
    assert seen == [True]


async def test_hung_threads_are_replaced_up_to_a_bound(threads):
    hung = [Hung() for _ in range(5)]
    calls = [asyncio.ensure_future(threads.run([job], timeout_s=0.03)) for job in hung]
    while threads.num_hung() < 2:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert sum(job.started.is_set() for job in hung) <= 4
    assert threads.num_hung() == 2
    for job in hung:
        job.go.set()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, BackendTimeout) for outcome in outcomes)
    assert await threads.run([lambda _batch: 1] * 8, timeout_s=1) == [1] * 8
    assert threads.num_hung() == 0


async def test_error_of_a_job_is_raised_after_all_jobs_ended(threads):
    ended = []

    def bad(_batch):
        raise BackendUnavailable("no")

    def slow(_batch):
        time.sleep(0.01)
        ended.append(True)

    with pytest.raises(BackendUnavailable, match="no"):
        await threads.run([bad, slow], timeout_s=1)
    assert ended == [True]


async def test_idle_threads_keep_no_buffers_alive(threads):
    class Buffer(bytearray):
        pass

    buffer = Buffer(8)
    gone = weakref.ref(buffer)
    await threads.run([lambda _batch, b=buffer: len(b)], timeout_s=1)
    del buffer
    await asyncio.sleep(0.01)
    gc.collect()
    assert gone() is None


async def test_closed_threads_refuse_jobs_and_leave_hung_ones_behind():
    threads = IoThreads("test", 2)
    hung = Hung()
    call = asyncio.ensure_future(threads.run([hung], timeout_s=None))
    await started(hung)
    await threads.close(timeout_s=0.01)
    with pytest.raises(BackendUnavailable, match="closed"):
        await threads.run([hung], timeout_s=1)
    hung.go.set()
    assert await call == [False]
