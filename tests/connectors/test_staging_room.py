"""Whether copies find room on the device after vLLM has taken its part."""

from dataclasses import replace

import pytest
import torch
from vllm.config import CacheConfig

from vllm_hicache.connectors.staging_room import allocate, refuse_without_room, staging_bytes
from vllm_hicache.device_layout import DeviceGroup, RowFormat, TensorPlacement, device_layers
from vllm_hicache.errors import ConfigError
from vllm_hicache.kernels.device_memory import CUDA_CHUNK_BYTES, UPLOAD_ROWS
from vllm_hicache.kernels.reference import PageCopier
from vllm_hicache.kernels.workspace import WorkspaceSize
from vllm_hicache.layout import LayerSpan, PageLayout
from vllm_hicache.tiers import Direction

pytestmark = pytest.mark.vllm

GIB, MIB = 1 << 30, 1 << 20
NEEDED = 192 * MIB
TOTAL = 16 * GIB


def _cache(utilization: float = 0.9, kv_bytes: int | None = None) -> CacheConfig:
    return CacheConfig(gpu_memory_utilization=utilization, kv_cache_memory_bytes=kv_bytes)


def test_copies_have_room_in_what_vllm_leaves():
    refuse_without_room(NEEDED, GIB, TOTAL, _cache())
    refuse_without_room(NEEDED, NEEDED, TOTAL, _cache(0.98, 4 * GIB))


def test_a_device_that_vllm_takes_whole_is_refused_with_the_utilization_that_fits():
    message = (
        r"need 192\.00 MiB of device memory \(201326592 bytes\), vLLM leaves 81\.92 MiB; "
        r"lower --gpu-memory-utilization from 0\.995 to 0\.988 or less"
    )
    with pytest.raises(ConfigError, match=message):
        refuse_without_room(NEEDED, 2 * GIB, TOTAL, _cache(0.995))
    refuse_without_room(NEEDED, 2 * GIB, TOTAL, _cache(0.988))


def test_a_device_that_others_have_filled_is_refused_by_what_is_free():
    with pytest.raises(ConfigError, match=r"leaves 92\.00 MiB; .* from 0\.9 to 0\.893 or less"):
        refuse_without_room(NEEDED, 92 * MIB, TOTAL, _cache())
    with pytest.raises(ConfigError, match="other processes use the device"):
        refuse_without_room(NEEDED, 92 * MIB, TOTAL, _cache(0.003))


def test_a_kv_cache_of_a_given_size_is_refused_with_the_size_that_fits():
    fitting = 4 * GIB - 100 * MIB
    with pytest.raises(ConfigError, match=f"--kv-cache-memory-bytes from {4 * GIB} to {fitting}"):
        refuse_without_room(NEEDED, 92 * MIB, TOTAL, _cache(kv_bytes=4 * GIB))


def test_copies_need_what_the_documents_say():
    """Two buffers and the rows that name units, in both directions; torch needs a third buffer."""
    size = WorkspaceSize(scratch_bytes=0, staging_bytes=CUDA_CHUNK_BYTES, num_rows=UPLOAD_ROWS)
    without_triton = replace(size, scratch_bytes=CUDA_CHUNK_BYTES)
    assert len(Direction) * size.device_bytes == 260 * MIB
    assert len(Direction) * without_triton.device_bytes == (260 + 128) * MIB


def _copier(device: str) -> PageCopier:
    layout = PageLayout(4, LayerSpan(0, 2), 2, 0, 2, 2, 2, 32, 0)
    block = layout.page_bytes // 2
    layers = device_layers(
        TensorPlacement((0, 1), 6, 6 * block, block),
        RowFormat(2, 16, 16, 2),
        layout_name="LBNHC",
        block_size=4,
    )
    kv = torch.zeros(12 * block, dtype=torch.uint8, device=device)
    return PageCopier(kv, [DeviceGroup(0, 4, (layers,))], layout)


def test_a_worker_on_a_cpu_needs_no_staging():
    copier = allocate([_copier("cpu")], _cache(1.0))
    assert all(copier._workspaces[direction].staging is None for direction in Direction)


@pytest.mark.gpu
def test_what_is_asked_for_is_what_copies_take():
    copiers = [_copier("cuda")]
    before = torch.cuda.memory_allocated()
    copier = allocate(copiers, _cache())
    taken, told = torch.cuda.memory_allocated() - before, staging_bytes(copiers)
    assert 0.9 * told <= taken <= told
    del copier
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_a_full_device_is_refused():
    copiers = [_copier("cuda")]
    filler = torch.empty(torch.cuda.mem_get_info()[0] - 64 * MIB, dtype=torch.int8, device="cuda")
    with pytest.raises(ConfigError, match="copies between device and host need"):
        allocate(copiers, _cache(kv_bytes=GIB))
    del filler
    torch.cuda.empty_cache()
