"""Copies of equal runs of host memory to a CUDA device, one call for all runs.

torch copies between host and device in one piece only where both sides are contiguous; any other
copy passes a temporary in pageable memory. The copy engines of a device know strides themselves.
"""

import ctypes
from functools import cache

from vllm_hicache.errors import InvariantBroken

_HOST, _DEVICE = 1, 2


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's interface."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_uint),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_uint),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


def copy_runs_to_device(
    source: int, target: int, *, run_bytes: int, stride: int, num_runs: int, stream: int
) -> None:
    """Enqueue the copy of ``num_runs`` runs of ``run_bytes``, ``stride`` bytes apart in host
    memory, to one contiguous piece of device memory. Addresses and the stream are plain numbers.

    All runs lie in one page-locked piece; in pageable memory the copy is right, but not ordered
    with the stream alone.
    """
    copy = _Copy2D(
        srcMemoryType=_HOST,
        srcHost=source,
        srcPitch=stride,
        dstMemoryType=_DEVICE,
        dstDevice=target,
        dstPitch=run_bytes,
        WidthInBytes=run_bytes,
        Height=num_runs,
    )
    status = _driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream))
    if status:
        raise InvariantBroken(
            f"copy of {num_runs} runs of {run_bytes} bytes to the device: CUDA error {status}"
        )


@cache
def _driver() -> ctypes.CDLL:
    """The driver's library, which is there wherever a CUDA device is."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpy2DAsync_v2.argtypes = (ctypes.POINTER(_Copy2D), ctypes.c_void_p)
    driver.cuMemcpy2DAsync_v2.restype = ctypes.c_int
    return driver
