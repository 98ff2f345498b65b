"""Where the rows of a worker's pools lie in vLLM's KV buffer."""

from collections.abc import Mapping

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from vllm_hicache.connectors.kv_pools import WorkerPool
from vllm_hicache.connectors.vllm_view import KVFormat
from vllm_hicache.device_layout import (
    DeviceGroup,
    DeviceLayers,
    RowFormat,
    TensorPlacement,
    device_layers,
)
from vllm_hicache.pools import KVGroup


def device_groups(
    worker_pool: WorkerPool,
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    groups: tuple[KVGroup, ...],
) -> tuple[DeviceGroup, ...]:
    """Where the rows of this pool lie in the worker's KV buffer, group by group. Groups share the
    buffer from its first byte on: a block id means nothing without its group."""
    places = layer_places(worker_pool)
    made = []
    for number, names in worker_pool.layers.items():
        block_size = 1 if groups[number].is_state else groups[number].block_size
        wanted = {name: places[name] for name in names}
        layers = [
            _device_layers(worker_pool.kv, tensor, wanted, kv_caches, kv_cache_config, block_size)
            for tensor in kv_cache_config.kv_cache_tensors
            if not wanted.keys().isdisjoint(tensor.layers)
        ]
        made.append(DeviceGroup(number, block_size, tuple(layers)))
    return tuple(made)


def layer_places(worker_pool: WorkerPool) -> dict[str, int]:
    """Places of the worker's layers in its pages of a pool, by vLLM's names."""
    names = [name for each in worker_pool.layers.values() for name in each]
    return {name: i for i, name in enumerate(sorted(names, key=extract_layer_index))}


def _device_layers(
    kv: KVFormat,
    tensor: KVCacheTensor,
    places: Mapping[str, int],
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    block_size: int,
) -> DeviceLayers:
    """The layers of ``places`` in one of vLLM's tensors, which may hold layers of other pools, too.

    Axis 2 of vLLM's views tells into blocks of how many tokens its kernels split a block.
    """
    placement = TensorPlacement(
        layers=tuple(places.get(name) for name in tensor.layers),
        num_blocks=kv_cache_config.num_blocks,
        layer_stride=tensor.layer_stride,
        block_stride=tensor.block_stride,
        offset=tensor.offset,
    )
    rows = RowFormat(
        num_heads=kv.num_heads,
        k_bytes=kv.k_bytes,
        v_bytes=kv.v_bytes,
        itemsize=kv.itemsize,
        packing=kv.packing,  # type: ignore[arg-type]
    )
    view = next(kv_caches[name] for name in tensor.layers if name in places)
    return device_layers(
        placement,
        rows,
        layout_name=str(kv_cache_config.kv_cache_layout),
        block_size=block_size,
        kernel_block_size=view.shape[2],
    )
