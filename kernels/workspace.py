"""Memory that the copies of one direction pass, shared by all pools of a worker."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from vllm_hicache.kernels.batch_copy import copy_in_memory
from vllm_hicache.kernels.device_memory import ROW_BYTES
from vllm_hicache.kernels.staging import Staging


@dataclass(frozen=True, slots=True)
class WorkspaceSize:
    """What a pool needs; of several pools, the largest numbers.

    scratch_bytes  for one gather by torch
    staging_bytes  of each of two staging buffers, on a CUDA device
    num_rows       units that the device is told of at once
    """

    scratch_bytes: int
    staging_bytes: int
    num_rows: int

    @classmethod
    def largest(cls, sizes: "Sequence[WorkspaceSize]") -> "WorkspaceSize":
        """What serves each of several pools in turn."""
        return cls(
            max(size.scratch_bytes for size in sizes),
            max(size.staging_bytes for size in sizes),
            max(size.num_rows for size in sizes),
        )

    @property
    def device_bytes(self) -> int:
        """Memory of a CUDA device that a workspace of this size takes."""
        return self.scratch_bytes + 2 * self.staging_bytes + self.num_rows * ROW_BYTES


class Workspace:
    """Scratch for one gather and, on a CUDA device, staging buffers. Not thread-safe."""

    def __init__(self, size: WorkspaceSize, device: torch.device) -> None:
        self.scratch = torch.empty(size.scratch_bytes, dtype=torch.uint8, device=device)
        self.staging = (
            None if device.type == "cpu" else Staging(size.staging_bytes, size.num_rows, device)
        )

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Order all copies inside after the current stream, and what follows after them."""
        if self.staging is None:
            yield
            return
        with self.staging.ordered():
            yield

    def copy_batch(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
        """Copy (addresses and bytes, each [n] int64) without a buffer, inside ``ordered``."""
        if self.staging is None:
            copy_in_memory(targets, sources, sizes)
        else:
            self.staging.copy_batch(targets, sources, sizes)
