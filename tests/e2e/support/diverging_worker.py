"""One worker of a real engine does something else than the others, when a file says so.

The file holds ``RANK:WHAT``; that worker does it at the next occasion, and renames the file to
``DONE`` with the step in which it did. WHAT is

    fail        a save fails, as a copy may
    fail load   a load fails
    arguments   the plan arrives with the rows of its save in another order
    result      another answer than the plan's failed requests
    order       a hook is called twice
    slow loads  every load takes long, for as long as the file says so
"""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from copy_spy import Copies, Regions

from vllm_hicache.connectors.hicache import HiCacheConnector
from vllm_hicache.connectors.messages import PlanMetadata
from vllm_hicache.connectors.worker_side import WorkerSide
from vllm_hicache.kernels.reference import PoolsCopier
from vllm_hicache.plan import CopyOp, StepPlan

DONE = "done"
SLOW_LOAD_S = 0.15


class Orders:
    """What this worker is told to do wrong."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self.step = 0

    def says(self, what: str) -> bool:
        """Whether the file tells this worker so now."""
        try:
            return self._path.read_text() == f"{self._rank}:{what}"
        except FileNotFoundError:
            return False

    def take(self, what: str) -> bool:
        """Whether to do it now; once."""
        if not self.says(what):
            return False
        self._path.write_text(str(self.step))
        self._path.rename(self._path.with_name(DONE))
        return True


def diverge_on_demand(path: Path, rank: int) -> None:
    """From now on this process obeys the file. Call it before the connector is made."""
    orders = Orders(path, rank)
    HiCacheConnector.bind_connector_metadata = binding(
        HiCacheConnector.bind_connector_metadata, orders
    )
    HiCacheConnector.get_transfer_results = asking(HiCacheConnector.get_transfer_results, orders)
    WorkerSide.take_failed_requests = answering(WorkerSide.take_failed_requests, orders)
    PoolsCopier.save = failing(PoolsCopier.save, orders, "fail")
    PoolsCopier.load = failing(slowed(PoolsCopier.load, orders), orders, "fail load")


def binding(bind: Callable[..., None], orders: Orders) -> Callable[..., None]:
    def bind_other(connector: HiCacheConnector, metadata: Any) -> None:
        if isinstance(metadata, PlanMetadata):
            orders.step = metadata.plan.number
            if metadata.plan.saves and orders.take("arguments"):
                metadata = PlanMetadata(with_reversed_rows(metadata.plan))
        bind(connector, metadata)

    return bind_other


def with_reversed_rows(plan: StepPlan) -> StepPlan:
    """The same copies in another order."""
    first, *others = plan.saves
    return replace(plan, saves=(CopyOp(first.op_id, first.copies[::-1].copy()), *others))


def asking(ask: Callable[..., Any], orders: Orders) -> Callable[..., Any]:
    def ask_twice(connector: HiCacheConnector, finished: set[str]) -> Any:
        if orders.take("order"):
            connector.worker_side.take_failed_requests()
        return ask(connector, finished)

    return ask_twice


def answering(answer: Callable[..., set[str]], orders: Orders) -> Callable[..., set[str]]:
    @functools.wraps(answer)  # keeps the mark for the checker
    def answer_otherwise(side: WorkerSide) -> set[str]:
        found = answer(side)
        return {*found, "nobody"} if orders.take("result") else found

    return answer_otherwise


def failing(copy: Callable[..., None], orders: Orders, what: str) -> Callable[..., None]:
    def copy_or_fail(copier: PoolsCopier, copies: Copies, host: Regions) -> None:
        if orders.take(what):
            raise OSError("told to fail")
        copy(copier, copies, host)

    return copy_or_fail


def slowed(copy: Callable[..., None], orders: Orders) -> Callable[..., None]:
    def copy_slowly(copier: PoolsCopier, copies: Copies, host: Regions) -> None:
        if orders.says("slow loads"):
            time.sleep(SLOW_LOAD_S)
        copy(copier, copies, host)

    return copy_slowly
