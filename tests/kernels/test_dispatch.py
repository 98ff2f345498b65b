"""Which way copies take, what it needs on a machine, and what the kernel becomes on a device."""

import re

import numpy as np
import pytest
import torch
from dense_worker import Case, dense_buffer, host_region

from vllm_hicache.device_layout import DeviceGroup, RowFormat, device_layers
from vllm_hicache.errors import InvariantBroken
from vllm_hicache.kernels import batch_copy, dispatch
from vllm_hicache.kernels.batch_copy import DriverBatch, copy_in_memory, driver_batch
from vllm_hicache.kernels.dispatch import COPY_ENGINE_RUN_BYTES, Path, path_of
from vllm_hicache.kernels.part_grid import part_grids
from vllm_hicache.kernels.reference import PageCopier, PoolsCopier
from vllm_hicache.tiers import Direction

CUDA = torch.device("cuda", 0)


def _layers(case):
    return device_layers(
        dense_buffer(case).placement,
        RowFormat(case.num_heads, case.k_bytes, case.v_bytes, 2),
        layout_name=case.layout_name,
        block_size=case.block_size,
    )


def test_a_cpu_takes_torch_and_never_asks_for_runs():
    def unasked():
        raise AssertionError

    assert path_of(torch.device("cpu"), unasked) is Path.TORCH


@pytest.mark.parametrize(
    ("run_bytes", "has_batches", "has_triton", "path"),
    [
        (COPY_ENGINE_RUN_BYTES, True, True, Path.COPY_ENGINE),
        (COPY_ENGINE_RUN_BYTES - 1, True, True, Path.TRITON),
        (COPY_ENGINE_RUN_BYTES, False, True, Path.TRITON),
        (COPY_ENGINE_RUN_BYTES, False, False, Path.TORCH),
    ],
)
def test_a_device_takes_the_fastest_path_that_it_has(
    monkeypatch, run_bytes, has_batches, has_triton, path
):
    batches = object() if has_batches else None
    monkeypatch.setattr(dispatch, "driver_batch", lambda device: batches)
    monkeypatch.setattr(dispatch, "has_triton", lambda: has_triton)
    assert path_of(CUDA, lambda: run_bytes) is path


def test_a_library_without_batches_is_no_error(monkeypatch):
    libc = "libc.so.6"  # a real library that lacks the call
    monkeypatch.setattr(batch_copy, "_LIBRARY", libc)
    with pytest.raises(AttributeError, match="cuMemcpyBatchAsync"):
        DriverBatch()
    assert driver_batch.__wrapped__(CUDA) is None
    monkeypatch.setattr(batch_copy, "_LIBRARY", "libnothing.so.1")
    assert driver_batch.__wrapped__(CUDA) is None


def test_a_kernel_that_does_not_compile_leaves_the_copies_to_torch(monkeypatch, caplog):
    def fail(*_):
        raise OSError("no compiler")

    case = Case()
    raw = dense_buffer(case).raw
    group = DeviceGroup(0, case.block_size, (_layers(case),))
    monkeypatch.setattr(dispatch, "_compiled", fail)
    monkeypatch.setattr(dispatch, "relayout_path", lambda device: Path.TRITON)
    PageCopier(raw, [group], case.layout)
    assert "Triton does not work here, torch copies instead: no compiler" in caplog.text
    with pytest.raises(OSError, match="no compiler"):
        PageCopier(raw, [group], case.layout, path=Path.TRITON)


def _compiled_for_hopper(case, *, to_pages):
    """The kernel's assembly, and how its tensors lie over threads; no device is needed for it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_hicache.kernels.triton_units import Sizes, TritonUnits, move_units

    group = DeviceGroup(0, case.block_size, (_layers(case),))
    (grid,) = part_grids(group, case.layout, min(case.block_size, case.page_size))
    units = TritonUnits(dense_buffer(case).raw, grid, Sizes(16, 16, 2048))
    constants = {**units.constants, "TO_PAGES": to_pages}
    words = {torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8"}
    word = words[units.dtype]
    arguments = {
        "blocks": word,
        "pages": word,
        "rows": "*i64",
        "segments": "*i64",
        "num_items": "i32",
        "slot_stride": "i32",
    }
    source = ASTSource(
        fn=triton.jit(move_units),
        signature={**arguments, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(4)},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    return compiled.asm["ptx"], compiled.asm["ttgir"]


@pytest.mark.parametrize("to_pages", [True, False])
@pytest.mark.parametrize(
    ("case", "loads", "stores"),
    [
        (Case(k_bytes=256, v_bytes=256, block_size=16, page_size=64), "v2.b64", "v2.b64"),
        (Case(k_bytes=576, v_bytes=576, block_size=16, page_size=64), "v2.b64", "v2.b64"),
        (Case("LBNHC", k_bytes=66, v_bytes=66, block_size=16, page_size=64), "b32", "b32"),
    ],
)
def test_the_kernel_moves_16_bytes_at_a_time_where_rows_allow(
    monkeypatch, tmp_path, case, loads, stores, to_pages
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    code, placed = _compiled_for_hopper(case, to_pages=to_pages)
    assert set(re.findall(r"st\.global\.([\w.]+)", code)) == {stores}
    assert set(re.findall(r"ld\.global\.([\w.]+)", code)) == {loads, "b64"}  # rows and tables, too
    # Threads side by side take words side by side, and so on from item to item.
    assert set(re.findall(r"order = (\[\d, \d\])", placed)) == {"[1, 0]"}


def test_copies_in_memory_are_what_a_batch_says():
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    offsets, sizes = np.array([0, 40]), np.array([8, 16])
    copy_in_memory(target.ctypes.data + offsets[::-1], source.ctypes.data + offsets, sizes)
    assert target[40:48].tolist() == list(range(8))
    assert target[:16].tolist() == list(range(40, 56))
    assert not target[16:40].any()
    assert not target[48:].any()


@pytest.mark.gpu
def test_a_refused_batch_is_an_error():
    batch = driver_batch(CUDA)
    assert batch is not None
    stream = torch.cuda.Stream(CUDA)
    one = np.array([64])
    with pytest.raises(InvariantBroken, match="batch of 1 copies: CUDA error"):
        batch.enqueue(np.array([0]), one, one, stream.cuda_stream)


@pytest.mark.gpu
@pytest.mark.parametrize("path", list(Path))
def test_copies_take_the_device_memory_of_the_start_and_no_more(path):
    case = Case(
        num_layers=8,
        num_heads=8,
        k_bytes=256,
        v_bytes=256,
        block_size=16,
        page_size=256,
        num_blocks=100,
    )
    raw = dense_buffer(case).raw.to(CUDA)
    group = DeviceGroup(0, case.block_size, (_layers(case),))
    host = host_region(case, 6, "cuda")
    copies = case.copies(range(6), range(1, 97))
    pool = PageCopier(raw, [group], case.layout, path=path)
    before = torch.cuda.memory_allocated(CUDA)
    copier = PoolsCopier([pool])
    torch.cuda.synchronize()
    taken = torch.cuda.memory_allocated(CUDA) - before
    assert 0 <= taken <= len(Direction) * pool.workspace_size.device_bytes
    allocations = torch.cuda.memory_stats(CUDA)["allocation.all.allocated"]
    for _ in range(3):
        copier.save((copies,), (host,))
        copier.load((copies,), (host,))
        torch.cuda.synchronize()
    if path is not Path.TORCH:
        assert torch.cuda.memory_stats(CUDA)["allocation.all.allocated"] == allocations
