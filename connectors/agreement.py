"""What all workers of an engine agree on before any of them allocates: one gather on the CPU."""

from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import distributed

from vllm_hicache.errors import ConfigError

_REFUSED = -1


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker's part of the agreement. ``num_slots`` is -1 where it refused to start."""

    replica: int
    """Data-parallel rank: other replicas take part in the gather, not in the agreement."""
    worker_id: int
    num_slots: int
    layout_digest: int
    page_bytes: int

    def as_tensor(self) -> torch.Tensor:
        return torch.tensor(
            [self.replica, self.worker_id, self.num_slots, self.layout_digest, self.page_bytes],
            dtype=torch.int64,
        )

    @classmethod
    def refused(cls, replica: int, worker_id: int) -> "WorkerFacts":
        return cls(replica, worker_id, _REFUSED, 0, 0)


def layout_digest(*details: object) -> int:
    """63 bits over everything that must be equal on all workers."""
    text = repr(details)
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little") >> 1


def gather_facts(own: WorkerFacts, group: "distributed.ProcessGroup | None") -> list[WorkerFacts]:
    """The facts of every worker of this replica, by worker id. Collective: all call it once."""
    vectors = [own.as_tensor()]
    if group is not None and distributed.get_world_size(group) > 1:
        vectors = [torch.empty_like(vectors[0]) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(vectors, own.as_tensor(), group=group)
    facts = [WorkerFacts(*(int(number) for number in vector)) for vector in vectors]
    return sorted((f for f in facts if f.replica == own.replica), key=lambda f: f.worker_id)


def agree_on_slots(facts: list[WorkerFacts], world_size: int) -> int:
    """The number of host slots that every worker has room for.

    Raises ConfigError with the numbers where a worker refused or computed another layout.
    """
    if [f.worker_id for f in facts] != list(range(world_size)):
        raise ConfigError(
            f"expected workers 0 to {world_size - 1}, heard of {[f.worker_id for f in facts]}"
        )
    refused = [f.worker_id for f in facts if f.num_slots == _REFUSED]
    if refused:
        raise ConfigError(f"workers {refused} refused to start; their logs say why")
    digests = {f.layout_digest for f in facts}
    if len(digests) > 1:
        listing = ", ".join(f"worker {f.worker_id}: {f.layout_digest:x}" for f in facts)
        raise ConfigError(f"the workers differ in page layout or options: {listing}")
    return min(f.num_slots for f in facts)
