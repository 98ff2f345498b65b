"""Memory that the copies of one direction pass, shared by all pools of a worker."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vllm_hicache.kernels.staging import Staging


class Workspace:
    """Scratch for one gather and, on a CUDA device, staging buffers. Not thread-safe."""

    def __init__(self, scratch_bytes: int, staging_bytes: int, device: torch.device) -> None:
        self.scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
        self.staging = None if device.type == "cpu" else Staging(staging_bytes, device)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Order all copies inside after the current stream, and what follows after them."""
        if self.staging is None:
            yield
            return
        with self.staging.ordered():
            yield
