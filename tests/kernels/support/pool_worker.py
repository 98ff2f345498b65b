"""A worker in miniature: KV cache groups over one buffer, the pools they feed, and their slots.

What a page must hold is said by plain transposition of what was written through views; the views
are vLLM's own, or follow the order of a packed block spelt out.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_hicache.device_layout import (
    DeviceGroup,
    RowFormat,
    TensorPlacement,
    device_layers,
)
from vllm_hicache.kernels.reference import PageCopier, PoolsCopier
from vllm_hicache.layout import LayerSpan, PageLayout, granule_tokens

NUM_PAGES = 4


@dataclass(frozen=True)
class Layer:
    """One layer of a KV cache group. Sizes in bytes and tokens."""

    pool: int = 0
    heads: int = 2
    content: int = 32
    """Of one token of one head; of a state, all of it."""
    block: int = 4
    """Tokens that a block id of its group stands for in this layer."""
    page: int = 8
    """Tokens of a page of its pool."""
    kind: str = "full"
    kernel_block: int | None = None
    padded: int | None = None
    """Bytes of a block with padding."""

    @property
    def page_bytes(self):
        return self.padded or self.heads * self.block * self.content


def state(pool, content, padded):
    return Layer(pool, 1, content, block=1, page=1, kind="state", padded=padded)


Groups = tuple[tuple[Layer, ...], ...]
"""The layers of each KV cache group."""


@dataclass
class Buffer:
    """One worker's KV buffer: ``tensors`` are placements with the numbers of their layers."""

    raw: torch.Tensor
    tensors: list[tuple[int, list[int], TensorPlacement]]
    views: dict[tuple[int, int], torch.Tensor]  # [kernel blocks, heads, tokens, content] uint8


def _tensors_of(group):
    """vLLM gives the layers of one shape in a group one tensor; which pool they have is ours."""
    shapes: dict[Layer, list[int]] = {}
    for i, layer in enumerate(group):
        shapes.setdefault(replace(layer, pool=0, page=0), []).append(i)
    return list(shapes.values())


def packed_buffer(groups, num_blocks, layout_name="BLHNC"):
    """Blocks one after the other, in each the pages of a group's layers, then padding."""
    assert layout_name == "BLHNC"
    stride = max(sum(layer.page_bytes for layer in group) for group in groups) + 16
    raw = torch.zeros(num_blocks * stride, dtype=torch.uint8)
    tensors, views = [], {}
    for number, group in enumerate(groups):
        offset = 0
        for members in _tensors_of(group):
            page = group[members[0]].page_bytes
            tensors.append((number, members, TensorPlacement((), num_blocks, page, stride, offset)))
            for i in members:
                heads, block, content = group[i].heads, group[i].block, group[i].content
                shape, strides = (
                    (num_blocks, heads, block, content),
                    (stride, block * content, content, 1),
                )
                views[number, i] = raw.as_strided(shape, strides, offset)
                offset += page
    return Buffer(raw, tensors, views)


def _spec_of(layer):
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVQuantMode,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    if layer.kind == "state":
        return MambaSpec(
            block_size=8,
            shapes=((layer.content - 20,), (5,)),
            dtypes=(torch.uint8, torch.float32),
            page_size_padded=layer.padded,
        )
    shape = {
        "block_size": layer.block,
        "num_kv_heads": layer.heads,
        "dtype": torch.uint8,
        "page_size_padded": layer.padded,
    }
    if layer.kind in ("latent", "index"):
        return MLAAttentionSpec(head_size=layer.content, **shape)
    half = layer.content // 2
    if layer.kind == "scaled":  # a float32 scale behind the K and the V of every row
        return FullAttentionSpec(
            head_size=half - 4,
            state_content_bytes=layer.content,
            kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD,
            **shape,
        )
    if layer.kind == "window":
        return SlidingWindowSpec(head_size=half, sliding_window=16, **shape)
    return FullAttentionSpec(head_size=half, **shape)


def vllm_buffer(groups, num_blocks, layout_name):
    """As vLLM places and allocates the same groups."""
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    config = VllmConfig()
    config.cache_config.kv_cache_layout = layout_name
    config.cache_config.num_gpu_blocks_override = num_blocks
    specs = []
    for number, group in enumerate(groups):
        by_name = {f"{number}.{i}": _spec_of(layer) for i, layer in enumerate(group)}
        spec = UniformTypeKVCacheSpecs(block_size=group[0].block, kv_cache_specs=by_name)
        specs.append(KVCacheGroupSpec(list(by_name), spec))
    placed = get_kv_cache_config_from_groups(config, specs, 1 << 30)
    kernel_blocks = [group[0].kernel_block for group in groups]
    caches = allocate_kv_cache(
        placed, torch.device("cpu"), KVCacheLayout[layout_name], kernel_blocks
    )
    tensors = []
    for tensor in placed.kv_cache_tensors:
        (number, *_), *_ = names = [tuple(map(int, name.split("."))) for name in tensor.layers]
        placement = TensorPlacement(
            (), num_blocks, tensor.layer_stride, tensor.block_stride, tensor.offset
        )
        tensors.append((number, [i for _, i in names], placement))
    storage = next(iter(caches.values())).untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
    views = {
        tuple(map(int, name.split("."))): cache.view(torch.uint8) for name, cache in caches.items()
    }
    return Buffer(raw, tensors, views)


class PoolWorker:
    """A buffer, the pools over it, host slots, and a chain of pages in blocks of each group."""

    def __init__(
        self,
        groups,
        make_buffer,
        *,
        layout_name="BLHNC",
        device="cpu",
        seed=0,
        chunk_bytes=None,
        path=None,
    ):
        self.rng = np.random.default_rng(seed)
        self.groups, self.layout_name = groups, layout_name
        sizes = [-(-NUM_PAGES * group[0].page // group[0].block) for group in groups]
        num_blocks = sum(sizes) + 3
        ids = self.rng.permutation(np.arange(1, num_blocks))
        self.blocks = np.split(ids[: sum(sizes)], np.cumsum(sizes)[:-1])  # of each group
        self.slots = self.rng.permutation(NUM_PAGES + 3)[:NUM_PAGES]
        self.buffer = make_buffer(groups, num_blocks, layout_name)
        self.raw = self.buffer.raw.to(device)
        self.layouts = self._lay_out()
        self.copier = PoolsCopier(
            [
                PageCopier(
                    self.raw,
                    self.device_groups(pool),
                    layout,
                    chunk_bytes=chunk_bytes,
                    path=path,
                )
                for pool, layout in enumerate(self.layouts)
            ]
        )
        sizes = [(NUM_PAGES + 3) * layout.slot_stride for layout in self.layouts]
        arena = torch.full((sum(sizes),), 0xEE, dtype=torch.uint8, pin_memory=device == "cuda")
        self.host = tuple(
            region.view(NUM_PAGES + 3, layout.slot_stride)
            for region, layout in zip(arena.split(sizes), self.layouts, strict=True)
        )
        self.copies = tuple(map(self._copies, groups, self.blocks))

    def _lay_out(self):
        """Layouts of all pools; fills in the places of layers, which follow no order."""
        layers = [
            ((g, i), layer) for g, group in enumerate(self.groups) for i, layer in enumerate(group)
        ]
        self.places, layouts = {}, []
        for pool in range(1 + max(layer.pool for _, layer in layers)):
            members = [(key, layer) for key, layer in layers if layer.pool == pool]
            order = self.rng.permutation(len(members)).tolist()
            self.places |= {key: place for (key, _), place in zip(members, order, strict=True)}
            like, count = members[0][1], len(members)
            heads_per_group = like.heads if pool % 2 else 1
            heads = (0, like.heads, like.heads, heads_per_group)
            span = LayerSpan(3, 3 + 2 * count)  # between layers of other pools
            numbers = self.rng.choice(np.arange(span.start, span.stop), count, replace=False)
            page = PageLayout(like.page, span, span.stop, *heads, like.content, 0)
            layouts.append(replace(page, members=tuple(sorted(numbers.tolist()))))
        return layouts

    def device_groups(self, pool):
        """What the pool has of each group."""
        found: dict[int, list] = {}
        for number, members, placement in self.buffer.tensors:
            group = self.groups[number]
            of_pool = [i for i in members if group[i].pool == pool]
            if not of_pool:
                continue
            like = group[of_pool[0]]
            places = tuple(self.places[number, i] if i in of_pool else None for i in members)
            rows = RowFormat(like.heads, like.content, 0, 1)
            if like.kind == "state":
                rows = replace(rows, packing="opaque")
            found.setdefault(number, []).append(
                device_layers(
                    replace(placement, layers=places),
                    rows,
                    layout_name=self.layout_name,
                    block_size=like.block,
                    kernel_block_size=like.kernel_block,
                )
            )
        return [
            DeviceGroup(
                number,
                next(layer.block for layer in self.groups[number] if layer.pool == pool),
                tuple(layers),
            )
            for number, layers in found.items()
        ]

    def _copies(self, group, blocks):
        page, block = group[0].page, group[0].block
        granule = granule_tokens(page, block)
        tokens = np.arange(0, NUM_PAGES * page, granule)
        columns = (
            self.slots[tokens // page],
            tokens % page // granule,
            blocks[tokens // block],
            tokens % block // granule,
        )
        return np.stack(columns, axis=1).astype(np.int32)

    def write(self):
        """Fill the blocks of every group with bytes of no pattern; returns them by layer."""
        content = {}
        for (number, i), view in self.buffer.views.items():
            layer, blocks = self.groups[number][i], self.blocks[number]
            shape = (len(blocks), layer.heads, layer.block, layer.content)
            content[number, i] = rows = self.rng.integers(0, 256, shape, dtype=np.uint8)
            size = layer.kernel_block or layer.block
            split = rows.reshape(len(blocks), layer.heads, -1, size, layer.content).swapaxes(1, 2)
            kernel_blocks = view.unflatten(0, (-1, layer.block // size))
            kernel_blocks[torch.from_numpy(blocks)] = torch.from_numpy(split.copy())
        self.raw.copy_(self.buffer.raw)
        return content

    def pages(self, content):
        """[pages, head groups, layers, tokens, heads of a group, content] of each pool."""
        expected = []
        for pool, layout in enumerate(self.layouts):
            pages = np.zeros((NUM_PAGES, *_page_shape(layout)), np.uint8)
            for (number, i), rows in content.items():
                if self.groups[number][i].pool != pool:
                    continue
                by_token = rows.swapaxes(1, 2).reshape(-1, layout.num_heads * layout.row_bytes)
                split = by_token[: NUM_PAGES * layout.page_size].reshape(
                    NUM_PAGES, layout.page_size, *_head_shape(layout)
                )
                pages[:, :, self.places[number, i]] = split.swapaxes(1, 2)
            expected.append(pages)
        return expected

    def saved(self):
        """The same pages as the host has them."""
        settle(self.raw)
        return [
            region[self.slots, : layout.page_bytes].numpy().reshape(NUM_PAGES, *_page_shape(layout))
            for region, layout in zip(self.host, self.layouts, strict=True)
        ]


def _head_shape(layout):
    return layout.num_head_groups, layout.heads_per_group, layout.row_bytes


def _page_shape(layout):
    groups, *heads = _head_shape(layout)
    return groups, layout.num_layers, layout.page_size, *heads


def settle(raw):
    if raw.device.type == "cuda":
        torch.cuda.synchronize()
