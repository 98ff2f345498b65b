"""Device memory for copies: vLLM sizes its KV cache before it makes a connector, so what copies
need must fit into what vLLM leaves; whether it does is found out at start."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm_hicache.errors import ConfigError
from vllm_hicache.kernels.reference import PageCopier, PoolsCopier
from vllm_hicache.kernels.workspace import WorkspaceSize
from vllm_hicache.quantities import rounded_size
from vllm_hicache.tiers import Direction

if TYPE_CHECKING:
    from vllm.config import CacheConfig


def staging_bytes(copiers: Sequence[PageCopier]) -> int:
    """Device memory that copies of these pools need, in both directions."""
    size = WorkspaceSize.largest([copier.workspace_size for copier in copiers])
    return len(Direction) * size.device_bytes


def allocate(
    copiers: Sequence[PageCopier], cache_config: "CacheConfig", *, more_bytes: int = 0
) -> PoolsCopier:
    """The copier of all pools with its memory; ConfigError where a CUDA device has none left, or
    not ``more_bytes`` besides, which the caller is going to take."""
    device = copiers[0].device
    if device.type != "cuda":
        return PoolsCopier(copiers)
    needed = staging_bytes(copiers) + more_bytes
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    refuse_without_room(needed, free, total, cache_config)
    try:
        return PoolsCopier(copiers)
    except torch.cuda.OutOfMemoryError as error:  # what is free lies in pieces
        raise ConfigError(_refusal(needed, needed, total, cache_config)) from error


def refuse_without_room(needed: int, free: int, total: int, cache_config: "CacheConfig") -> None:
    """ConfigError where ``needed`` bytes are not ``free``, or would come out of the part of the
    device that vLLM keeps for itself: its next large prefill would find them taken."""
    left = free
    if not cache_config.kv_cache_memory_bytes:
        left = min(free, int(total * (1 - cache_config.gpu_memory_utilization)))
    if needed > left:
        raise ConfigError(_refusal(needed, needed - left, total, cache_config))


def _refusal(needed: int, missing: int, total: int, cache_config: "CacheConfig") -> str:
    text = (
        f"copies between device and host need {rounded_size(needed)} of device memory "
        f"({needed} bytes), vLLM leaves {rounded_size(max(0, needed - missing))}; "
    )
    kv_bytes = cache_config.kv_cache_memory_bytes
    if kv_bytes:
        return (
            text + f"lower --kv-cache-memory-bytes from {kv_bytes} to {max(0, kv_bytes - missing)}"
        )
    given = cache_config.gpu_memory_utilization
    fitting = int((given - missing / total) * 1000) / 1000
    if fitting <= 0:
        return text + "other processes use the device: free its memory"
    return text + f"lower --gpu-memory-utilization from {given} to {fitting:.3f} or less"
