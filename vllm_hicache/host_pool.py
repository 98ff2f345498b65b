"""The memory behind host slots: one memfd, mapped by the worker and by its storage process."""

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch

from vllm_hicache.errors import ConfigError, InvariantBroken
from vllm_hicache.layout import registration_slots

TOUCH_THREADS = 8  # touching first pins 8 GiB in 2.0 s, pinning alone in 3.5 s; 16 gain no more


class HostPool:
    """``num_slots`` host slots, each ``slot_strides[i]`` bytes of region i; zero at first, backed
    when touched.

    ``tensors[i]`` is [num_slots, slot_strides[i]] uint8 on the CPU and lies ``bases[i]`` bytes into
    the memory. ``fd`` may be inherited by a child, which maps the same memory; the kernel frees it
    when the last process has let it go.
    """

    def __init__(
        self, num_slots: int, slot_strides: Sequence[int], *, name: str = "hicache"
    ) -> None:
        if num_slots <= 0 or min(slot_strides, default=0) <= 0:
            raise ConfigError(
                f"the host pool needs at least one slot, got {num_slots} of "
                f"{' + '.join(map(str, slot_strides)) or 0} bytes"
            )
        self.num_slots = num_slots
        self.slot_strides = tuple(slot_strides)
        ends = list(accumulate((num_slots * stride for stride in slot_strides), _place_behind))
        self.bases = tuple(
            end - num_slots * stride for end, stride in zip(ends, slot_strides, strict=True)
        )
        self.num_bytes = ends[-1]
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self._pinned: list[int] = []  # addresses
        try:
            os.ftruncate(self.fd, self.num_bytes)
            memory = mmap.mmap(self.fd, self.num_bytes)
        except OSError:
            os.close(self.fd)
            raise
        # The tensors own the mapping: it ends with the last view, so no view ever dangles.
        # Any thread may write it, also when vLLM makes the pool in inference mode.
        with torch.inference_mode(mode=False):
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            self._tensors: tuple[torch.Tensor, ...] = tuple(
                flat[base : base + num_slots * stride].view(num_slots, stride)
                for base, stride in zip(self.bases, slot_strides, strict=True)
            )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All slots, region by region; InvariantBroken after ``close``."""
        if not self._tensors:
            raise InvariantBroken("the host pool is closed")
        return self._tensors

    def pin(self) -> bool:
        """Lock the memory for copies by the current CUDA device; False where there is none.

        Pins whole slots in pieces of at most 1 GiB. All or nothing; a refusal is a ConfigError.
        """
        if not torch.cuda.is_available():
            return False
        pieces = [
            piece
            for region, stride in zip(self.tensors, self.slot_strides, strict=True)
            for piece in region.split(registration_slots(stride))
        ]
        with ThreadPoolExecutor(TOUCH_THREADS) as threads:
            for piece in threads.map(_touch, pieces):
                self._register(piece)
        return True

    def _register(self, piece: torch.Tensor) -> None:
        result = torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0)
        if int(result) != 0:
            self.unpin()
            raise ConfigError(
                f"host_memory: {piece.numel()} of {self.num_bytes} bytes could not be pinned "
                f"({result}); lower host_memory or raise the limit of locked memory"
            )
        self._pinned.append(piece.data_ptr())

    def unpin(self) -> None:
        """Unlock what ``pin`` locked. No copy may be running."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop())

    def close(self) -> None:
        """Let the memory go: unpin, close ``fd``, drop the tensors. A second call does nothing.

        The mapping ends when the caller has dropped its views, too.
        """
        if not self._tensors:
            return
        self.unpin()
        self._tensors = ()
        os.close(self.fd)


def _place_behind(end: int, num_bytes: int) -> int:
    """End of a region that begins at the first memory page after ``end``."""
    return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE + num_bytes


def _touch(piece: torch.Tensor) -> torch.Tensor:
    """Have every memory page of ``piece`` backed, whatever it holds; the GIL is free meanwhile."""
    piece.view(-1)[:: mmap.PAGESIZE].bitwise_or_(0)
    return piece
