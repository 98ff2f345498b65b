"""The memory behind host slots: one memfd, mapped by the worker and by its storage process."""

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Sequence
from itertools import accumulate

import torch

from vllm_hicache import numa
from vllm_hicache.errors import ConfigError, InvariantBroken
from vllm_hicache.layout import PoolPiece, pool_pieces
from vllm_hicache.memory_pages import populate

_POPULATE_BYTES = 32 << 20
"""Backed by one call: 10 ms, for which no other thread of the process can map memory."""
RELEASE_S = 60.0
"""Longest wait for an earlier pool of the same process."""
_CAPTURE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""


class HostPool:
    """``num_slots`` host slots, each ``slot_strides[i]`` bytes of region i; zero at first, backed
    when touched.

    ``tensors[i]`` is [num_slots, slot_strides[i]] uint8 on the CPU and lies ``bases[i]`` bytes into
    the memory. ``fd`` may be inherited by a child, which maps the same memory; the kernel frees it
    when the last process has let it go. ``device`` is the CUDA device that copies to and from it;
    None, or a CPU: there is none.
    """

    def __init__(
        self,
        num_slots: int,
        slot_strides: Sequence[int],
        *,
        name: str = "hicache",
        device: torch.device | None = None,
    ) -> None:
        if num_slots <= 0 or min(slot_strides, default=0) <= 0:
            raise ConfigError(
                f"the host pool needs at least one slot, got {num_slots} of "
                f"{' + '.join(map(str, slot_strides)) or 0} bytes"
            )
        self.num_slots = num_slots
        self.slot_strides = tuple(slot_strides)
        _await_releases(RELEASE_S)
        ends = list(accumulate((num_slots * stride for stride in slot_strides), _place_behind))
        self.bases = tuple(
            end - num_slots * stride for end, stride in zip(ends, slot_strides, strict=True)
        )
        self.num_bytes = ends[-1]
        self._device = device if device is not None and device.type == "cuda" else None
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self._pinned: list[int] = []  # addresses
        try:
            os.ftruncate(self.fd, self.num_bytes)
            memory = mmap.mmap(self.fd, self.num_bytes)
        except OSError:
            os.close(self.fd)
            raise
        self.pieces: tuple[PoolPiece, ...] = tuple(pool_pieces(num_slots, slot_strides))
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

    @property
    def is_pinned(self) -> bool:
        """Whether what is made ready is locked for copies by the device."""
        return self._device is not None

    @property
    def numa_node(self) -> int | None:
        """That of the device, where there is a choice."""
        if self._device is None:
            return None
        found = torch.cuda.get_device_properties(self._device)
        parts = (found.pci_domain_id, found.pci_bus_id, found.pci_device_id)
        return numa.pci_node("{:04x}:{:02x}:{:02x}.0".format(*parts))

    def piece_bytes(self, piece: PoolPiece) -> int:
        """Bytes of one of ``pieces``."""
        return (piece.stop - piece.first) * self.slot_strides[piece.region]

    def enter_thread(self) -> None:
        """Prepare the calling thread, which does nothing else in its life, for ``make_ready``."""
        if self._device is None:
            return
        torch.cuda.set_device(self._device)
        # vLLM captures graphs meanwhile, in the mode that lets no other thread pin memory: neither
        # would the pinning succeed nor the capture. This thread's calls are no part of any capture.
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def make_ready(self, piece: PoolPiece) -> str:
        """Have the piece backed, whatever it holds, and pinned where a device copies.

        Any number of threads may, each another piece; the GIL is free meanwhile. Returns why it
        was not possible, "" where it was.
        """
        slots = self.tensors[piece.region][piece.first : piece.stop]
        try:
            _back(slots)
        except OSError as error:
            return f"no memory for {slots.numel()} bytes more ({error.strerror})"
        if self._device is None:
            return ""
        result = torch.cuda.cudart().cudaHostRegister(slots.data_ptr(), slots.numel(), 0)
        if int(result) != 0:
            return f"{slots.numel()} bytes more could not be pinned ({result})"
        self._pinned.append(slots.data_ptr())
        return ""

    def unpin(self) -> None:
        """Unlock what was pinned. No copy and no ``make_ready`` may be running."""
        _unpin_all(self._pinned)

    def close(self) -> None:
        """Let the memory go: close ``fd``, unpin, drop the tensors. A second call does nothing.

        A thread unpins: vLLM gives an engine 5 s to end, and one with 64 GiB was not done by then.
        The mapping ends with it and the caller's views; the next pool of the process waits for it.
        """
        if not self._tensors:
            return
        tensors, self._tensors = self._tensors, ()
        os.close(self.fd)
        if self._pinned:
            thread = threading.Thread(
                target=_release,
                args=(self._device, self._pinned, tensors),
                name="hicache-unpin",
                daemon=True,
            )
            _releases.append(thread)
            thread.start()
            self._pinned = []


_releases: list[threading.Thread] = []
"""That unpin the memory of closed pools."""


def _await_releases(timeout_s: float) -> None:
    """Two pools at once may be more than the machine has."""
    deadline = time.monotonic() + timeout_s
    while _releases and time.monotonic() < deadline:
        _releases[-1].join(max(0.0, deadline - time.monotonic()))
        _releases[:] = [thread for thread in _releases if thread.is_alive()]


def _release(
    device: torch.device | None, addresses: list[int], tensors: tuple[torch.Tensor, ...]
) -> None:
    """Unlock pieces of these tensors, which stay mapped until then."""
    if device is not None:
        torch.cuda.set_device(device)  # a new thread would open a context on the first one
    _unpin_all(addresses)
    del tensors


def _unpin_all(addresses: list[int]) -> None:
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())


def _place_behind(end: int, num_bytes: int) -> int:
    """End of a region that begins at the first memory page after ``end``."""
    return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE + num_bytes


def _back(slots: torch.Tensor) -> None:
    """Have every memory page of contiguous ``slots`` backed, whatever it holds; OSError where there
    is none left."""
    flat = slots.view(-1)
    for part in flat.split(_POPULATE_BYTES):
        number = populate(part.data_ptr(), part.numel())
        if number == errno.EINVAL:  # an older kernel; without memory this ends the process
            part[:: mmap.PAGESIZE].bitwise_or_(0)
        elif number:
            raise OSError(number, os.strerror(number))
