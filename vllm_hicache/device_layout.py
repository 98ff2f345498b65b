"""Where vLLM keeps the row of each (layer, block, head, token), as offsets and strides in bytes.

All six layouts of vLLM and the CPU backend's transposed K come out as the same few numbers.
"""

from dataclasses import dataclass, replace
from typing import Literal

from vllm_hicache.errors import ConfigError

Packing = Literal["rows", "k_transposed", "opaque"]
LAYOUT_NAMES = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Axes from outer to inner: layer, block, head, token (N), content."""


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Same-shaped layers in a worker's KV buffer, in the terms of vLLM's KVCacheTensor (bytes).

    ``layers[i]`` is the place, in the worker's pages of a pool, of the i-th layer of the tensor;
    None: the layer is not of that pool.
    """

    layers: tuple[int | None, ...]
    num_blocks: int
    layer_stride: int
    block_stride: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What a block holds per head: K and V rows of ``k_bytes`` and ``v_bytes`` per token.

    ``rows``          K then V of a token side by side
    ``k_transposed``  all K of the block as (element, token), then all V as (token, element)
    ``opaque``        unknown inside; only a whole block of one head has a meaning. A state is such
                      a block of one token: ``k_bytes`` is its content without padding
    """

    num_heads: int
    k_bytes: int
    v_bytes: int
    itemsize: int
    packing: Packing = "rows"


@dataclass(frozen=True, slots=True)
class RowPart:
    """Where one part of a row lies. Element e of token t, head h, block b of a layer starts at
    ``base + b*block_stride + h*head_stride + t*token_stride + e*element_stride`` bytes into the
    layer and goes to ``row_offset + e*element_bytes`` of the host row.
    """

    row_offset: int
    num_elements: int
    element_bytes: int
    base: int
    block_stride: int
    head_stride: int
    token_stride: int
    element_stride: int


@dataclass(frozen=True, slots=True)
class DeviceLayers:
    """Same-shaped layers of one worker. The layer in place ``layers[i]`` of its page starts at
    ``base_bytes + indices[i]*layer_stride`` bytes into the KV buffer. Blocks are kernel blocks.
    """

    layers: tuple[int, ...]
    indices: tuple[int, ...]
    base_bytes: int
    layer_stride: int
    num_blocks: int
    num_heads: int
    block_size: int
    row_bytes: int
    whole_blocks: bool
    parts: tuple[RowPart, ...]


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """What a pool has of one KV cache group of vLLM, whose blocks have ids of their own.

    All layers have the same kernel block size and number of blocks.
    """

    group: int
    """Its number in vLLM's order."""
    block_size: int
    """Tokens that a block id of the group stands for in this pool; 1 for states."""
    layers: tuple[DeviceLayers, ...]


def device_layers(
    placement: TensorPlacement,
    rows: RowFormat,
    *,
    layout_name: str,
    block_size: int,
    kernel_block_size: int | None = None,
) -> DeviceLayers:
    """Resolve vLLM's layout name and placement into strides; ConfigError for what cannot be.

    ``block_size`` is the scheduler's. Where vLLM splits blocks for its kernels, each
    ``kernel_block_size`` tokens (axis 2 of vLLM's views) are laid out as a block of their own.
    """
    if kernel_block_size is not None:
        placement = _split_blocks(placement, block_size, kernel_block_size)
        block_size = kernel_block_size
    if layout_name not in LAYOUT_NAMES:
        allowed = ", ".join(LAYOUT_NAMES)
        raise ConfigError(f"KV cache layout {layout_name!r} is not known; allowed: {allowed}")
    row_bytes = rows.k_bytes + rows.v_bytes
    head_stride, token_stride = _inner_strides(placement, rows, layout_name, block_size)
    common = (placement.block_stride, head_stride)
    if rows.packing != "rows" and token_stride != row_bytes:
        raise ConfigError(
            f"packing {rows.packing} needs all tokens of a head side by side; "
            f"layout {layout_name} separates them"
        )
    parts: tuple[RowPart, ...]
    if rows.packing == "k_transposed":
        parts = _transposed_parts(rows, block_size, common)
    else:
        parts = (RowPart(0, 1, row_bytes, 0, *common, token_stride, row_bytes),)
    placed = {i: place for i, place in enumerate(placement.layers) if place is not None}
    if not placed:
        raise ConfigError("a tensor of the KV cache has no layer of the pool")
    return DeviceLayers(
        layers=tuple(placed.values()),
        indices=tuple(placed),
        base_bytes=placement.offset,
        layer_stride=placement.layer_stride,
        num_blocks=placement.num_blocks,
        num_heads=rows.num_heads,
        block_size=block_size,
        row_bytes=row_bytes,
        whole_blocks=rows.packing == "opaque",
        parts=parts,
    )


def _split_blocks(
    placement: TensorPlacement, block_size: int, kernel_block_size: int
) -> TensorPlacement:
    ratio, odd_tokens = divmod(block_size, kernel_block_size)
    if odd_tokens or ratio == 0 or placement.block_stride % ratio:
        raise ConfigError(
            f"blocks of {block_size} tokens and {placement.block_stride} bytes cannot be split "
            f"into kernel blocks of {kernel_block_size} tokens"
        )
    return replace(
        placement,
        num_blocks=placement.num_blocks * ratio,
        block_stride=placement.block_stride // ratio,
    )


def _inner_strides(
    placement: TensorPlacement, rows: RowFormat, layout_name: str, block_size: int
) -> tuple[int, int]:
    """Head and token stride: from the innermost axis outwards, layer and block being given."""
    extents = {
        "L": len(placement.layers),
        "B": placement.num_blocks,
        "H": rows.num_heads,
        "N": block_size,
        "C": rows.k_bytes + rows.v_bytes,
    }
    strides = {"L": placement.layer_stride, "B": placement.block_stride}
    dense = 1
    for axis in reversed(layout_name):
        dense = strides.setdefault(axis, dense) * extents[axis]
    return strides["H"], strides["N"]


def _transposed_parts(
    rows: RowFormat, block_size: int, common: tuple[int, int]
) -> tuple[RowPart, RowPart]:
    if rows.k_bytes != rows.v_bytes or rows.k_bytes % rows.itemsize:
        raise ConfigError(
            f"packing k_transposed needs K and V rows of one size in whole elements of "
            f"{rows.itemsize} bytes, got {rows.k_bytes} and {rows.v_bytes} bytes"
        )
    elements, item, v_base = rows.k_bytes // rows.itemsize, rows.itemsize, block_size * rows.k_bytes
    keys = RowPart(0, elements, item, 0, *common, item, block_size * item)
    values = RowPart(rows.k_bytes, 1, rows.v_bytes, v_base, *common, rows.v_bytes, rows.v_bytes)
    return keys, values
