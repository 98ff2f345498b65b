"""The torch page copier against vLLM's own views, vLLM's own CPU kernel and a NumPy transpose."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_worker import (
    Buffer,
    Case,
    Copier,
    dense_buffer,
    logical_bytes,
    oracle,
    synchronize,
)
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.device_layout import (
    LAYOUT_NAMES,
    RowFormat,
    TensorPlacement,
    device_layers,
)
from vllm_hicache.errors import ConfigError, InvariantBroken

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _vllm_buffer(case, dtype=torch.bfloat16, padded_page=None):
    """As vLLM allocates it: KVCacheTensor, compute_layout_strides and create_kv_cache_views."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = FullAttentionSpec(
        block_size=case.block_size,
        num_kv_heads=case.num_heads,
        head_size=case.k_bytes // dtype.itemsize,
        head_size_v=case.v_bytes // dtype.itemsize,
        dtype=dtype,
        page_size_padded=padded_page,
    )
    layout = KVCacheLayout[case.layout_name]
    block_stride = None
    if padded_page is not None:
        layers = case.num_layers if layout.is_block_outermost else 1
        block_stride = padded_page * layers
    layer_stride, block_stride, *_ = compute_layout_strides(
        spec,
        case.num_blocks,
        case.num_layers,
        layout,
        fixed_strides=(None, block_stride, None, None, None),
    )
    size = case.offset + case.num_layers * case.num_blocks * spec.page_size_bytes
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(case.num_layers)]
    tensor = KVCacheTensor(size, names, layer_stride, block_stride, case.offset)
    raw = torch.zeros(size, dtype=torch.int8)
    views = create_kv_cache_views(
        raw, spec, case.num_blocks, layout, tensor, kernel_block_size=case.kernel_block_size
    )
    placement = TensorPlacement(
        tuple(range(case.num_layers)), case.num_blocks, layer_stride, block_stride, case.offset
    )
    return Buffer(raw, placement, [view.view(torch.uint8) for view in views], case)


def _assert_round_trip(buffer, device="cpu", **options):
    """Save, compare pages with the oracle, wipe, load, compare every byte of the buffer."""
    case = buffer.case
    rng = np.random.default_rng(3)
    buffer.write(logical_bytes(case))
    storage, copier = buffer.copier(device, **options)
    before = storage.clone()
    num_blocks = case.num_pages * case.page_size // case.block_size
    block_ids = rng.permutation(np.arange(1, case.num_blocks))[:num_blocks]
    slots = rng.permutation(case.num_pages + 2)[: case.num_pages]
    host = torch.full((case.num_pages + 2, case.layout.slot_stride), 0xEE, dtype=torch.uint8)
    copies = case.copies(slots, block_ids)

    copier.save(copies, host)
    synchronize(device)
    page_bytes = case.layout.page_bytes
    np.testing.assert_array_equal(
        host[slots, :page_bytes].numpy(), oracle(case, logical_bytes(case), block_ids)
    )
    others = np.setdiff1d(np.arange(len(host)), slots)
    assert (host[others] == 0xEE).all()

    wiped = logical_bytes(case)
    wiped[:, block_ids] = 0
    buffer.write(wiped)
    storage.copy_(buffer.raw)
    assert not torch.equal(storage, before)
    copier.load(rng.permutation(copies), host)
    synchronize(device)
    assert torch.equal(storage, before)


def _sizes(factors):
    return st.sampled_from([(4, 4), (4, 16), (16, 4), (6, 2), (3, 9)]).map(
        lambda pair: {"page_size": pair[0] * factors, "block_size": pair[1] * factors}
    )


@st.composite
def _cases(draw):
    num_heads = draw(st.sampled_from([1, 2, 3, 8]))
    divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    sizes = draw(_sizes(draw(st.sampled_from([1, 2]))))
    return Case(
        layout_name=draw(st.sampled_from(LAYOUT_NAMES)),
        num_layers=draw(st.integers(1, 4)),
        num_blocks=draw(st.integers(6, 11)),
        num_heads=num_heads,
        heads_per_group=draw(st.sampled_from(divisors)),
        k_bytes=draw(st.sampled_from([2, 6, 16, 64])),
        v_bytes=draw(st.sampled_from([2, 16, 48])),
        **sizes,
    )


@given(case=_cases(), chunk_bytes=st.sampled_from([1, 2000, 1 << 20]))
def test_pages_are_a_plain_transposition_in_every_layout(case, chunk_bytes):
    _assert_round_trip(dense_buffer(case), chunk_bytes=chunk_bytes)


@pytest.mark.vllm
@given(case=_cases(), offset=st.sampled_from([0, 32, 6]))
def test_pages_agree_with_vllms_views_in_every_layout(case, offset):
    case = Case(**(vars(case) | {"offset": offset}))
    _assert_round_trip(_vllm_buffer(case))


@pytest.mark.vllm
@pytest.mark.parametrize("layout_name", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("kernel_block_size", [2, 4, 8])
@pytest.mark.parametrize("page_size", [4, 8, 16])
def test_blocks_split_for_kernels_give_the_same_pages(layout_name, kernel_block_size, page_size):
    case = Case(
        layout_name,
        num_heads=3,
        block_size=8,
        page_size=page_size,
        kernel_block_size=kernel_block_size,
    )
    _assert_round_trip(_vllm_buffer(case))


@pytest.mark.vllm
@pytest.mark.parametrize("layout_name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_padding_between_blocks_is_not_part_of_pages(layout_name):
    case = Case(layout_name)
    page = case.num_heads * case.block_size * case.row_bytes
    _assert_round_trip(_vllm_buffer(case, padded_page=page + 96))


@pytest.mark.gpu
@pytest.mark.parametrize("layout_name", LAYOUT_NAMES)
@pytest.mark.parametrize(("page_size", "block_size"), [(32, 8), (8, 32), (16, 16)])
def test_device_pages_are_a_plain_transposition(layout_name, page_size, block_size):
    case = Case(
        layout_name,
        num_blocks=40,
        num_heads=8,
        heads_per_group=2,
        page_size=page_size,
        block_size=block_size,
        k_bytes=64,
        v_bytes=48,
    )
    three_pages = 3 * case.layout.slot_stride
    for chunk_bytes in (1, three_pages, 1 << 25):
        _assert_round_trip(dense_buffer(case), "cuda", chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("device", DEVICES)
def test_partial_save_keeps_the_rest_of_the_page(device):
    case = Case(block_size=2, page_size=8)
    buffer = dense_buffer(case)
    buffer.write(logical_bytes(case))
    _, copier = buffer.copier(device)
    host = torch.full((2, case.layout.slot_stride), 0xEE, dtype=torch.uint8)
    copies = case.copies([1], [1, 2, 3, 4])
    copier.save(copies[1:3], host)
    synchronize(device)
    touched = host[1, : case.layout.page_bytes].view(2, 3, 4, -1)
    expected = oracle(case, logical_bytes(case), [1, 2, 3, 4]).reshape(2, 3, 4, -1)
    np.testing.assert_array_equal(touched[:, :, 1:3].numpy(), expected[:, :, 1:3])
    assert (touched[:, :, [0, 3]] == 0xEE).all()
    assert (host[0] == 0xEE).all()


@pytest.mark.parametrize("device", DEVICES)
def test_load_writes_only_the_named_granules(device):
    case = Case(block_size=8, page_size=2)
    buffer = dense_buffer(case)
    buffer.write(logical_bytes(case))
    storage, copier = buffer.copier(device)
    host = torch.randint(0, 256, (4, case.layout.slot_stride), dtype=torch.uint8)
    before = storage.cpu().view(3, 9, 2, 4, 2, -1)
    copier.load(np.array([[0, 0, 5, 1], [3, 0, 5, 2]], dtype=np.int32), host)
    synchronize(device)
    after = storage.cpu().view(3, 9, 2, 4, 2, -1)  # layer, block, head, granule, token, content
    others = [0, 1, 2, 3, 4, 6, 7, 8]
    assert torch.equal(after[:, others], before[:, others])
    assert torch.equal(after[:, 5, :, [0, 3]], before[:, 5, :, [0, 3]])
    pages = host[[0, 3], : case.layout.page_bytes].view(2, 2, 3, 2, -1)
    assert torch.equal(after[:, 5, :, 1:3], pages.permute(2, 1, 0, 3, 4))


def test_layers_may_lie_in_several_tensors_in_any_order():
    case = Case(num_layers=4)
    buffer = dense_buffer(case)
    buffer.write(logical_bytes(case))
    whole = buffer.placement
    halves = [
        device_layers(
            replace(whole, layers=places, offset=first * whole.layer_stride),
            RowFormat(case.num_heads, case.k_bytes, case.v_bytes, 2),
            layout_name=case.layout_name,
            block_size=case.block_size,
        )
        for places, first in (((2, 0), 0), ((3, 1), 2))
    ]
    copier = Copier(buffer.raw, halves, case.layout, case.block_size)
    host = torch.zeros((1, case.layout.slot_stride), dtype=torch.uint8)
    copier.save(case.copies([0], [7, 3]), host)
    expected = oracle(case, logical_bytes(case)[[1, 3, 0, 2]], [7, 3])
    np.testing.assert_array_equal(host[:, : case.layout.page_bytes].numpy(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_every_bit_pattern_survives(device):
    case = Case()
    buffer = dense_buffer(case)
    buffer.raw.copy_(torch.randint(0, 256, buffer.raw.shape, dtype=torch.uint8))
    buffer.raw[:4096].view(torch.int16).copy_(torch.arange(-(2**10), 2**10) << 5 | 0x7F80)
    storage, copier = buffer.copier(device)
    before = storage.clone()
    host = torch.zeros((4, case.layout.slot_stride), dtype=torch.uint8)
    copies = case.copies([0, 1, 2, 3], range(1, 9))
    copier.save(copies, host)
    synchronize(device)
    blocks = storage.view(3, 9, -1)
    blocks[:, 1:] = 0
    copier.load(copies, host)
    synchronize(device)
    assert torch.equal(storage, before)


def _cpu_kernel_pages(dtype, head_size, block_size, isa, page_size=64):
    """Pages of one run of tokens that vLLM's CPU attention wrote, and the rows it was given."""
    from vllm import _custom_ops as ops

    num_layers, num_heads, num_tokens = 2, 2, 128
    torch.manual_seed(0)
    rows = torch.randn(2, num_layers, num_tokens, num_heads, head_size).to(dtype)
    item = dtype.itemsize
    case = Case(
        num_layers=num_layers,
        num_blocks=1 + num_tokens // block_size,
        num_heads=num_heads,
        heads_per_group=2,
        k_bytes=head_size * item,
        v_bytes=head_size * item,
        block_size=block_size,
        page_size=page_size,
    )
    shape = (num_layers, case.num_blocks, num_heads, 2 * block_size, head_size)
    cache = torch.zeros(shape, dtype=dtype)
    for layer in range(num_layers):
        key_cache, value_cache = cache[layer].chunk(2, dim=2)
        slots = torch.arange(num_tokens) + block_size
        keys, values = rows[:, layer]
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    raw = cache.view(-1).view(torch.uint8)
    layers = device_layers(
        TensorPlacement((0, 1), case.num_blocks, cache.stride(0) * item, cache.stride(1) * item),
        RowFormat(num_heads, case.k_bytes, case.v_bytes, item, "k_transposed"),
        layout_name="LBHNC",
        block_size=block_size,
    )
    copier = Copier(raw, [layers], case.layout, block_size)
    num_pages = num_tokens // page_size
    host = torch.zeros((num_pages, case.layout.slot_stride), dtype=torch.uint8)
    copies = case.copies(range(num_pages), range(1, case.num_blocks))
    copier.save(copies, host)
    before = raw.clone()
    cache[:, 1:] = 0
    copier.load(copies, host)
    assert torch.equal(raw, before)
    return host[:, : case.layout.page_bytes], rows


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", [64, 80])
def test_cpu_blocks_of_every_size_give_the_same_canonical_pages(dtype, head_size):
    """Rows K then V of each token, although the CPU kernel keeps K transposed in its blocks."""
    pages, rows = _cpu_kernel_pages(dtype, head_size, 32, "vec" if head_size == 64 else "vec16")
    # K/V, layer, token, head, element -> page; layer, token, head, K/V, element
    canonical = rows.unflatten(2, (2, 64)).permute(2, 1, 3, 4, 0, 5).flatten(1)
    assert torch.equal(pages.contiguous().view(dtype), canonical)
    others = [(16, "vec16"), (64, "vec" if head_size == 64 else "vec16"), (128, "vec16")]
    for block_size, isa in others:
        assert torch.equal(_cpu_kernel_pages(dtype, head_size, block_size, isa)[0], pages)


def test_opaque_blocks_travel_whole():
    case = Case(heads_per_group=2, block_size=4, page_size=8)
    buffer = dense_buffer(case)
    buffer.write(logical_bytes(case))
    rows = RowFormat(case.num_heads, case.k_bytes, case.v_bytes, 2, "opaque")
    layers = device_layers(buffer.placement, rows, layout_name="LBHNC", block_size=4)
    copier = Copier(buffer.raw, [layers], case.layout, 4)
    host = torch.zeros((1, case.layout.slot_stride), dtype=torch.uint8)
    before = buffer.raw.clone()
    copier.save(case.copies([0], [3, 6]), host)
    buffer.raw.view(3, 9, -1)[:, [3, 6]] = 0
    copier.load(case.copies([0], [3, 6]), host)
    assert torch.equal(buffer.raw, before)
    with pytest.raises(ConfigError, match="multiple of the block size 4, got 2"):
        Copier(buffer.raw, [layers], replace(case, page_size=2).layout, 4)


def test_empty_list_copies_nothing():
    case = Case()
    _, copier = dense_buffer(case).copier()
    host = torch.zeros((1, case.layout.slot_stride), dtype=torch.uint8)
    copier.save(np.zeros((0, 4), dtype=np.int32), host)
    copier.load(np.zeros((0, 4), dtype=np.int32), host)
    assert not host.any()


@pytest.mark.parametrize(
    "row", [(2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 9, 0), (0, 0, 0, 1), (-1, 0, 0, 0)]
)
def test_index_out_of_range_is_refused_before_a_byte_moves(row):
    case = Case()
    _, copier = dense_buffer(case).copier()
    host = torch.zeros((2, case.layout.slot_stride), dtype=torch.uint8)
    copies = np.array([(0, 0, 1, 0), row], dtype=np.int32)
    with pytest.raises(InvariantBroken, match=r"is not below \(2, 2, 9, 1\)"):
        copier.load(copies, host)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2}, "2 layers once"),
        ({"num_layers": 4}, "4 layers once"),
        ({"num_heads": 4}, "share heads"),
        ({"k_bytes": 8}, "share heads"),
        ({"block_size": 6, "page_size": 6}, "divisor of 6"),
    ],
)
def test_buffer_of_another_shape_than_the_page_is_refused(changes, message):
    buffer = dense_buffer(Case())
    other = replace(Case(), **changes)
    layers = device_layers(
        buffer.placement, RowFormat(2, 16, 16, 2), layout_name="LBHNC", block_size=4
    )
    with pytest.raises(ConfigError, match=message):
        Copier(buffer.raw, [layers], other.layout, other.block_size)
