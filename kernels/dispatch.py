"""How copies are carried out: by torch, by a Triton kernel, or by a device's copy engines alone."""

import importlib.util
import logging
import subprocess
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from vllm_hicache.device_layout import DeviceGroup
from vllm_hicache.kernels.batch_copy import driver_batch
from vllm_hicache.kernels.part_grid import part_grids
from vllm_hicache.kernels.part_view import PartView
from vllm_hicache.layout import PageLayout
from vllm_hicache.tiers import Direction

logger = logging.getLogger(__name__)

# Bytes that lie side by side in blocks and pages from which on the copy engines alone are no slower
# than staging: 50.6 and 50.8 GB/s (save, load) against 49.2 and 50.1 with runs of 2 MiB, 49.4 and
# 49.5 against 48.9 and 49.9 with 1 MiB, 37.8 and 37.1 against 49.2 and 50.7 with 128 KiB.
# H200, PCIe 5, 2026-11-30, `benchmarks/copy_paths.py --repeat 3 --mib 512`.
COPY_ENGINE_RUN_BYTES = 2 << 20

# CTAs of a relayout, on as many SMs; decode has the others. 390 GB/s with 16, seven times the rate
# of the bus, 217 with 8, 656 with 32, 735 with all 132 (loads of the Llama-8B shape; same run).
RELAYOUT_CTAS = 16


class Path(StrEnum):
    """One way to carry out copies; all of them move the same bytes."""

    TORCH = "torch"
    TRITON = "triton"
    COPY_ENGINE = "copy_engine"


class Relayout(Protocol):
    """Moves units of some layers between blocks and pages that lie in the same memory."""

    def move(self, direction: Direction, rows: Tensor, pages: Tensor, scratch: Tensor) -> None:
        """Move the units of ``rows`` [n, 4] int64; on a CUDA device only enqueue it."""


def path_of(device: torch.device, run_bytes: Callable[[], int]) -> Path:
    """The fastest way on a device.

    run_bytes  of what lies side by side in blocks and pages; called where it matters
    """
    has_copy_engines = driver_batch(device) is not None
    if has_copy_engines and run_bytes() >= COPY_ENGINE_RUN_BYTES:
        return Path.COPY_ENGINE
    return relayout_path(device)


def relayout_path(device: torch.device) -> Path:
    """The fastest way to move units within one memory."""
    return Path.TRITON if device.type == "cuda" and has_triton() else Path.TORCH


def has_triton() -> bool:
    """Whether Triton is installed; it is not loaded."""
    return importlib.util.find_spec("triton") is not None


def relayouts(
    kv_storage: Tensor, group: DeviceGroup, layout: PageLayout, unit: int, path: Path | None
) -> list[Relayout]:
    """What moves the units of a group: one for each way in which its rows are cut.

    unit  tokens of a unit
    path  TORCH or TRITON; None: the fastest that works here
    """
    if (path or relayout_path(kv_storage.device)) is Path.TRITON:
        try:
            return _compiled(kv_storage, group, layout, unit)
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            if path is not None:
                raise
            logger.warning("HiCache: Triton does not work here, torch copies instead: %s", error)
    return [
        PartView(kv_storage, layers, part, layout, unit)
        for layers in group.layers
        for part in layers.parts
    ]


def _compiled(
    kv_storage: Tensor, group: DeviceGroup, layout: PageLayout, unit: int
) -> list[Relayout]:
    # Not before it is needed: an installation for CPUs may lack Triton.
    from vllm_hicache.kernels.triton_units import INTERPRETED, TritonUnits, device_sizes

    device = kv_storage.device
    sizes = INTERPRETED if device.type == "cpu" else device_sizes(device, RELAYOUT_CTAS)
    units = [TritonUnits(kv_storage, grid, sizes) for grid in part_grids(group, layout, unit)]
    if device.type == "cuda":
        for one in units:
            one.prepare(layout.slot_stride)
    return list(units)
