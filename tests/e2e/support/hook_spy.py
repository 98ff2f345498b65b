"""The order in which vLLM calls a worker's connector, as an engine in this process really does."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from vllm_hicache.connectors.hicache import HiCacheConnector

FIRST = "handle_preemptions"
NAMES = {
    FIRST: "preemptions",
    "bind_connector_metadata": "bind",
    "start_load_kv": "load",
    "wait_for_layer_load": "forward",
    "finish_forward": "end of forward",
    "wait_for_save": "save",
    "get_transfer_results": "results",
    "build_connector_worker_meta": "report",
    "clear_connector_metadata": "clear",
}
"""Hooks, and what they are called here. That of a layer, however often, is the forward."""


@contextmanager
def spying_hooks() -> Iterator[list[list[str]]]:
    """The hooks of every step from now on, one list a step."""
    steps: list[list[str]] = []

    def spied(hook: str) -> Any:
        original = getattr(HiCacheConnector, hook)

        def call(connector: HiCacheConnector, *arguments: Any, **named: Any) -> Any:
            if hook == FIRST:
                steps.append([])
            name = NAMES[hook]
            if name != "forward" or steps[-1][-1] != name:
                steps[-1].append(name)
            return original(connector, *arguments, **named)

        return call

    with ExitStack() as patches:
        for hook in NAMES:
            patches.enter_context(patch.object(HiCacheConnector, hook, spied(hook)))
        yield steps


def distinct(steps: list[list[str]]) -> list[str]:
    """Every order that was seen, in one line each."""
    return sorted({" > ".join(step) for step in steps})
