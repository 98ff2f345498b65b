"""Engines with many workers on few cores: imports are shared.

Every process of an engine imports vLLM: 8 s of a core each. Those that tests start are forked from
one server that has imported it and done nothing else, so that they are fresh otherwise.
"""

import multiprocessing.context
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

PRELOADED = ("vllm.v1.worker.cpu_worker", "vllm.entrypoints.llm", "worker_under_test")


class Process(multiprocessing.context.ForkServerProcess):
    """A forked process with an environment of its own: that of its parent, unless given."""

    def __init__(
        self, *arguments: Any, environment: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.environment = dict(os.environ if environment is None else environment)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        # A child would start a server of its own, and knows the one that it came from.
        forkserver._forkserver.ensure_running = lambda: None
        super().run()


class Context(multiprocessing.context.ForkServerContext):
    Process = Process


def start_server(environment: Mapping[str, str]) -> None:
    """Begin to import what engines need, for all processes of this one and of its children."""
    Context().set_forkserver_preload(list(PRELOADED))
    with _environment(environment):
        forkserver.ensure_running()


@contextmanager
def _environment(environment: Mapping[str, str]) -> Iterator[None]:
    saved = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def fork_workers() -> None:
    """Workers of engines in this process are forked by the server, too."""
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = Context
