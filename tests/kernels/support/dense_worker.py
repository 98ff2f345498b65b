"""A worker with one pool and one KV cache group, over a buffer without gaps in any layout."""

from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from vllm_hicache.device_layout import DeviceGroup, RowFormat, TensorPlacement, device_layers
from vllm_hicache.kernels.reference import PageCopier, PoolsCopier
from vllm_hicache.layout import LayerSpan, PageLayout


@dataclass(frozen=True)
class Case:
    """One worker's shape; sizes in bytes and tokens."""

    layout_name: str = "LBHNC"
    num_layers: int = 3
    num_blocks: int = 9
    num_heads: int = 2
    heads_per_group: int = 1
    k_bytes: int = 16
    v_bytes: int = 16
    block_size: int = 4
    page_size: int = 8
    kernel_block_size: int | None = None
    offset: int = 0
    packing: str = "rows"

    @property
    def row_bytes(self):
        return self.k_bytes + self.v_bytes

    @property
    def layout(self):
        layers = LayerSpan(5, 5 + self.num_layers)
        heads = (0, self.num_heads, self.num_heads, self.heads_per_group)
        return PageLayout(self.page_size, layers, 99, *heads, self.row_bytes, 0)

    @property
    def num_pages(self):
        return (self.num_blocks - 1) * self.block_size // self.page_size

    def copies(self, slots, block_ids):
        """Copy list of all tokens of ``block_ids`` to and from the pages in ``slots``."""
        granule = min(self.page_size, self.block_size)
        tokens = np.arange(0, len(slots) * self.page_size, granule)
        in_page, in_block = tokens % self.page_size, tokens % self.block_size
        slot = np.asarray(slots)[tokens // self.page_size]
        block = np.asarray(block_ids)[tokens // self.block_size]
        columns = (slot, in_page // granule, block, in_block // granule)
        return np.stack(columns, axis=1).astype(np.int32)


class Copier:
    """A worker with one KV cache group and one pool."""

    def __init__(self, raw, layers, layout, block_size, **options):
        group = DeviceGroup(0, block_size, tuple(layers))
        self._pools = PoolsCopier([PageCopier(raw, [group], layout, **options)])

    def save(self, copies, host):
        self._pools.save((copies,), (host,))

    def load(self, copies, host):
        self._pools.load((copies,), (host,))


def logical_bytes(case, seed=1):
    """[layers, blocks, heads, tokens, row_bytes] uint8; every word of 4 bytes names its place."""
    shape = (case.num_layers, case.num_blocks, case.num_heads, case.block_size, case.row_bytes)
    size = int(np.prod(shape))
    words = np.arange(size // 4 + 1, dtype=np.uint32) * 2 + seed
    return words.view(np.uint8)[:size].reshape(shape)


def oracle(case, logical, block_ids):
    """[pages, page_bytes]: the pages of the tokens in ``block_ids``, by plain transposition."""
    tokens = logical[:, block_ids].swapaxes(1, 2)
    grid = tokens.reshape(
        case.num_layers,
        case.num_heads // case.heads_per_group,
        case.heads_per_group,
        -1,
        case.page_size,
        case.row_bytes,
    )
    # layer, group, head, page, token, content -> page; group, layer, token, head, content
    pages = grid.transpose(3, 1, 0, 4, 2, 5)
    return pages.reshape(len(pages), -1)


@dataclass
class Buffer:
    """A worker's KV buffer and, per layer, what its tokens are by vLLM's own view of it."""

    raw: torch.Tensor
    placement: TensorPlacement
    views: list[torch.Tensor]  # [blocks, heads, tokens, row_bytes] uint8, strided
    case: Case

    def write(self, logical):
        for view, layer in zip(self.views, logical, strict=True):
            view.copy_(torch.from_numpy(self._to_kernel_blocks(layer)))

    def _to_kernel_blocks(self, layer):
        blocks, heads, tokens, row = layer.shape
        size = self.case.kernel_block_size or tokens
        split = layer.reshape(blocks, heads, tokens // size, size, row)
        return split.swapaxes(1, 2).reshape(-1, heads, size, row).copy()

    def copier(self, device="cpu", **options):
        case = self.case
        layers = device_layers(
            self.placement,
            RowFormat(case.num_heads, case.k_bytes, case.v_bytes, 2, case.packing),
            layout_name=case.layout_name,
            block_size=case.block_size,
            kernel_block_size=case.kernel_block_size,
        )
        storage = self.raw.to(device)
        return storage, Copier(storage, [layers], case.layout, case.block_size, **options)


def dense_buffer(case, raw=None):
    """Without vLLM: axes in the order of the layout's name, nothing between them."""
    extents = dict(
        zip(
            "LBHNC",
            (case.num_layers, case.num_blocks, case.num_heads, case.block_size, case.row_bytes),
            strict=True,
        )
    )
    if raw is None:
        raw = torch.zeros(prod(extents.values()), dtype=torch.uint8)
    whole = raw.view(*(extents[axis] for axis in case.layout_name))
    order = [case.layout_name.index(axis) for axis in "LBHNC"]
    whole = whole.permute(order)
    layers = tuple(range(case.num_layers))
    placement = TensorPlacement(layers, case.num_blocks, whole.stride(0), whole.stride(1))
    return Buffer(raw, placement, list(whole), case)


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def own_stream(device):
    """What is enqueued inside runs on a stream of its own, as copies do, and ends with it."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


def host_region(case, num_slots, device="cpu"):
    """Host slots of no content, page-locked where a device copies them."""
    shape = (num_slots, case.layout.slot_stride)
    return torch.full(shape, 0xEE, dtype=torch.uint8, pin_memory=device == "cuda")
