"""Many copies between host and device in one call: work for the copy engines, none for the SMs."""

import ctypes
import logging
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from vllm_hicache.errors import InvariantBroken

logger = logging.getLogger(__name__)

_STREAM_ORDER = 1  # sources are read in the order of the stream
_OVERLAP = 1  # the hint that the SMs are busy with other things
_LIBRARY = "libcuda.so.1"  # the driver's, there wherever a CUDA device is

BatchCopy = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
"""Copies (targets, sources, sizes): addresses and bytes, each [n] int64. No two copies overlap."""


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of the driver's interface; hints where memory lies are left empty."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


class DriverBatch:
    """The driver's call for batches of copies between page-locked and device memory.

    It came with CUDA 12.8; the form of CUDA 13 does not tell which copy was refused.
    """

    def __init__(self) -> None:
        """OSError or AttributeError where the driver lacks the call."""
        library = ctypes.CDLL(_LIBRARY)
        self._refused = ctypes.c_size_t()
        try:
            self._call = library.cuMemcpyBatchAsync_v2
            self._more: tuple[object, ...] = ()
        except AttributeError:
            self._call = library.cuMemcpyBatchAsync
            self._more = (ctypes.byref(self._refused),)
        array, size = ctypes.c_void_p, ctypes.c_size_t
        self._call.argtypes = [
            *(array, array, array, size),
            *(ctypes.POINTER(_Attributes), ctypes.POINTER(size), size),
            *(array for _ in self._more),
            ctypes.c_void_p,
        ]
        self._call.restype = ctypes.c_int
        self._attributes = _Attributes(source_order=_STREAM_ORDER, flags=_OVERLAP)
        self._first = ctypes.c_size_t(0)

    def enqueue(
        self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int
    ) -> None:
        """Enqueue copies on a stream, which must not be the legacy default one; the GIL is free."""
        arrays = [np.ascontiguousarray(each, dtype=np.int64) for each in (targets, sources, sizes)]
        status = self._call(
            *(each.ctypes.data for each in arrays),
            len(sizes),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            1,
            *self._more,
            stream,
        )
        if status:
            raise InvariantBroken(f"batch of {len(sizes)} copies: CUDA error {status}")


def copy_in_memory(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
    """The same on a CPU, one copy after the other: the twin of batches on a device."""
    for target, source, size in zip(
        targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
    ):
        ctypes.memmove(target, source, size)


@cache
def driver_batch(device: torch.device) -> DriverBatch | None:
    """The driver's call, tried once on ``device``; None where it is missing or does not copy."""
    if device.type != "cuda":
        return None
    try:
        batch = DriverBatch()
        works = _swaps_halves(batch, device)
    except (OSError, AttributeError, InvariantBroken) as error:
        logger.info("HiCache: this driver has no batches of copies (%s)", error)
        return None
    return batch if works else None


def _swaps_halves(batch: DriverBatch, device: torch.device) -> bool:
    half = 32
    host = torch.arange(2 * half, dtype=torch.uint8).pin_memory()
    copied = torch.zeros(2 * half, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    offsets = np.array([0, half])
    batch.enqueue(
        copied.data_ptr() + offsets,
        host.data_ptr() + offsets[::-1],
        np.array([half, half]),
        stream.cuda_stream,
    )
    stream.synchronize()
    return torch.equal(copied.cpu(), host.roll(half))
