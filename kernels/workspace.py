"""Memory that the copies of one direction pass, shared by all pools of a worker."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from vllm_hicache.kernels.batch_copy import copy_in_memory
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
