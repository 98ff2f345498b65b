"""What the storage benchmark needs of a service: a backend, raw clients, an empty store."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from vllm_hicache.storage import StorageBackend


class RawClient(Protocol):
    """What a user would write by hand against the service."""

    async def put(self, name: str, value: bytes) -> None:
        """Store header and payload, which are one already."""

    async def get(self, name: str, payload: memoryview) -> None:
        """Read and bring the payload to its place in the pool."""


@dataclass(frozen=True)
class Service:
    """One storage service under test."""

    backend: StorageBackend
    raw: Mapping[str, RawClient]  # the first one is what the backend is compared with
    server_cpu_s: Callable[[], float]
    empty: Callable[[], Awaitable[None]] | None = None
    """Leaves nothing of the way before; without it, raw objects are overwritten every round."""
    before_reads: Callable[[], None] | None = None
    """Called before each pass of reads."""
    more: dict[str, StorageBackend] = field(default_factory=dict)
    """The backend with other clients, by client."""


def cpu_s(pid: int) -> float:
    """CPU time of a process of this machine with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
