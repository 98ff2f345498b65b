"""Engines with many workers on few cores: imports are shared and waiting is sleeping.

- Whoever reads vLLM's shared-memory queue looks again and again for a second after each message.
  Where two cores carry ten processes, that starves storage servers until their answers are late.
- Every worker imports vLLM, about 8 s of a core each. Forked from one process that has imported
  it, they start at once; nothing else of it has run, so that they are fresh processes otherwise.
"""

import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
from typing import Any

PRELOADED = ("vllm.v1.worker.cpu_worker", "worker_under_test")


class Process(multiprocessing.context.ForkServerProcess):
    """A forked process with the environment of its parent, which the server it forks from lacks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


class Context(multiprocessing.context.ForkServerContext):
    Process = Process


def sleep_when_idle() -> None:
    """Readers of vLLM's queues in this process go to sleep at once."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    original = SpinCondition.__init__

    def init(condition: SpinCondition, *arguments: Any, **options: Any) -> None:
        original(condition, *arguments, **options)
        condition.busy_loop_s = 0

    if original.__name__ != init.__name__:
        SpinCondition.__init__ = init


def share_imports() -> None:
    """Workers that vLLM starts from now on are forked; the server imports vLLM beside us."""
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    multiprocessing.forkserver.ensure_running()
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = Context
