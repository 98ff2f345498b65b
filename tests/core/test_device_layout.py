"""Strides of rows in vLLM's blocks; that they are vLLM's own is tested with the page copier."""

from dataclasses import replace

import pytest

from vllm_hicache.device_layout import (
    LAYOUT_NAMES,
    RowFormat,
    RowPart,
    TensorPlacement,
    device_layers,
)
from vllm_hicache.errors import ConfigError

PLACEMENT = TensorPlacement(layers=(0, 1, 2), num_blocks=5, layer_stride=7000, block_stride=900)


ROWS = RowFormat(2, 32, 32, 2)


def _layers(layout_name="LBHNC", rows=ROWS, **options):
    return device_layers(PLACEMENT, rows, layout_name=layout_name, block_size=4, **options)


@pytest.mark.parametrize(
    ("layout_name", "head_stride", "token_stride"),
    [
        ("LBHNC", 4 * 64, 64),
        ("LBNHC", 64, 2 * 64),
        ("LHBNC", 5 * 900, 64),
        ("BLHNC", 4 * 64, 64),
        ("BLNHC", 64, 2 * 64),
        ("BHLNC", 3 * 7000, 64),
    ],
)
def test_inner_strides_follow_the_name(layout_name, head_stride, token_stride):
    (part,) = _layers(layout_name).parts
    assert (part.head_stride, part.token_stride) == (head_stride, token_stride)
    assert (part.block_stride, _layers(layout_name).layer_stride) == (900, 7000)


def test_transposed_keys_are_elements_apart_by_a_block_of_tokens():
    keys, values = _layers(rows=RowFormat(2, 32, 32, 2, "k_transposed")).parts
    assert keys == RowPart(0, 16, 2, 0, 900, 256, 2, 4 * 2)
    assert values == RowPart(32, 1, 32, 4 * 32, 900, 256, 32, 32)


@pytest.mark.parametrize("packing", ["opaque", "k_transposed"])
@pytest.mark.parametrize("layout_name", ["LBNHC", "BLNHC"])
def test_packing_inside_a_head_needs_its_tokens_side_by_side(packing, layout_name):
    with pytest.raises(ConfigError, match=f"{packing} .* {layout_name} separates"):
        _layers(layout_name, RowFormat(2, 32, 32, 2, packing))


def test_one_head_has_its_tokens_side_by_side_in_every_layout():
    assert _layers("LBNHC", RowFormat(1, 32, 32, 2, "opaque")).whole_blocks


def test_transposed_keys_must_be_as_wide_as_values():
    with pytest.raises(ConfigError, match="got 32 and 16 bytes"):
        _layers(rows=RowFormat(2, 32, 16, 2, "k_transposed"))


@pytest.mark.parametrize("layout_name", ["LBNHC", "BHLNC"])
def test_layers_of_another_pool_keep_their_place_in_the_tensor(layout_name):
    whole = _layers(layout_name)
    placement = replace(PLACEMENT, layers=(None, 4, None))
    some = device_layers(placement, ROWS, layout_name=layout_name, block_size=4)
    assert (some.layers, some.indices) == ((4,), (1,))
    assert replace(some, layers=whole.layers, indices=whole.indices) == whole


def test_tensor_without_a_layer_of_the_pool_is_refused():
    placement = replace(PLACEMENT, layers=(None, None, None))
    with pytest.raises(ConfigError, match="no layer of the pool"):
        device_layers(placement, ROWS, layout_name="LBNHC", block_size=4)


@pytest.mark.parametrize("layout_name", LAYOUT_NAMES)
def test_a_state_is_one_opaque_row_whatever_its_padding(layout_name):
    rows = RowFormat(1, 268_288, 0, 1, "opaque")
    placement = replace(PLACEMENT, block_stride=278_528)
    layers = device_layers(placement, rows, layout_name=layout_name, block_size=1)
    (part,) = layers.parts
    assert (part.num_elements, part.element_bytes, part.block_stride) == (1, 268_288, 278_528)
    assert (layers.row_bytes, layers.block_size, layers.whole_blocks) == (268_288, 1, True)


def test_unknown_layout_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'NHD' is not known; allowed: LBHNC, LBNHC"):
        _layers("NHD")


def test_kernel_blocks_are_blocks_of_their_own():
    layers = _layers(kernel_block_size=2)
    (part,) = layers.parts
    assert (layers.num_blocks, layers.block_size, part.block_stride) == (10, 2, 450)
    assert part.head_stride == 2 * 64


@pytest.mark.parametrize("tokens", [3, 8])
def test_blocks_that_cannot_be_split_are_refused(tokens):
    with pytest.raises(ConfigError, match=f"blocks of 4 tokens .* kernel blocks of {tokens}"):
        _layers(kernel_block_size=tokens)
