"""Where a worker stands in an engine: its tensor, pipeline and context parallel ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One worker, with vLLM's order of ranks: tensor parallel ranks are neighbours, then context
    parallel (prefill), then pipeline stages."""

    worker_id: int
    tp_rank: int
    pp_rank: int
    cp_rank: int

    def __str__(self) -> str:
        return f"worker {self.worker_id} (tp {self.tp_rank}, pp {self.pp_rank}, cp {self.cp_rank})"


def places(tp: int, pp: int, cp: int = 1) -> tuple[WorkerPlace, ...]:
    """All workers of an engine, by worker id.

    >>> print(*places(2, 2)[2:], sep="; ")
    worker 2 (tp 0, pp 1, cp 0); worker 3 (tp 1, pp 1, cp 0)
    """
    return tuple(
        WorkerPlace(worker_id, worker_id % tp, worker_id // (tp * cp), worker_id // tp % cp)
        for worker_id in range(tp * pp * cp)
    )
