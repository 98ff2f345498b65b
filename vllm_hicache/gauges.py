"""The gauges of one engine, set to the planner's present state."""

from typing import TYPE_CHECKING

from vllm_hicache.series import HOST, STORAGE

if TYPE_CHECKING:
    from vllm_hicache.planner import Planner

# What `Gauges.update` sets, in its order: name and label.
_NAMES = (
    ("host_slots_used", ""),
    ("host_slots_pinned", ""),
    ("host_slots_protected", ""),
    ("host_slots_kept", ""),
    ("device_blocks_held", ""),
    *(("operations_running", kind) for kind in ("save", "load", "exists", "fetch", "persist")),
    ("crossover_tokens", HOST),
    ("crossover_tokens", STORAGE),
)


class Gauges:
    """Sets what has changed; most steps change nothing."""

    def __init__(self, planner: "Planner") -> None:
        self._planner = planner
        self._shown: tuple[int, ...] = ()
        planner.metrics.gauge("host_slots_total", planner.options.num_host_slots)
        self.show_slots()

    def show_slots(self) -> None:
        """Host slots have got ready, or will not."""
        planner = self._planner
        planner.metrics.gauge("host_slots_ready", planner.host.slots.num_ready)
        planner.metrics.gauge("host_pools_short", planner.join.num_short_workers)

    def update(self) -> None:
        planner = self._planner
        host, saves = planner.host, planner.saves
        prefetcher, persists = planner.prefetcher, planner.persists
        state = (
            host.slots.num_used,
            host.num_pinned,
            host.num_protected,
            len(planner.pins),
            saves.num_held_blocks,
            saves.num_running,
            planner.loads.num_running,
            prefetcher.num_querying if prefetcher is not None else 0,
            prefetcher.num_reading if prefetcher is not None else 0,
            persists.num_running if persists is not None else 0,
            *planner.worth.crossovers(),
        )
        if state == self._shown:
            return
        self._shown = state
        for (name, label), value in zip(_NAMES, state, strict=True):
            planner.metrics.gauge(name, value, label)
