"""Namespace digests and names of stored objects."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import ConfigError, InvariantBroken
from vllm_hicache.keys import (
    FORMAT_VERSION,
    Namespace,
    ShardName,
    parse_shard_name,
    shard_ending,
    shard_name,
)
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage_backends.file_names import namespace_of

FIELDS = {
    "format_version": 1,
    "model_id": "org/model",
    "weights": "0123abcd",
    "dtype": "bfloat16",
    "kv_scales": "",
    "page_size": 256,
    "rope": "theta=10000",
    "group_kind": "full",
    "window": 0,
    "total_kv_heads": 8,
    "heads_per_group": 1,
    "layer_partition": 0,
    "k_row_bytes": 256,
    "v_row_bytes": 256,
    "object_layout": "hicache-page-1",
    "token_packing": "rows",
    "hash_version": 1,
    "epoch": "",
}


def test_digest_never_changes():
    assert Namespace(**FIELDS).digest == "hc1-bf81e9264003b387"


def test_the_namespace_has_the_format_version_of_the_objects_unless_told_otherwise():
    fields = {name: value for name, value in FIELDS.items() if name != "format_version"}
    assert Namespace(**fields).format_version == FORMAT_VERSION == 1


def test_the_digest_above_covers_every_field_in_order():
    assert tuple(FIELDS) == Namespace.__struct_fields__


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_changes_the_digest(name):
    value = FIELDS[name]
    other = value + 1 if isinstance(value, int) else value + "x"
    assert Namespace(**(FIELDS | {name: other})).digest != Namespace(**FIELDS).digest


def test_moving_text_between_neighbouring_fields_changes_the_digest():
    one = Namespace(**(FIELDS | {"model_id": "ab", "weights": "c"}))
    other = Namespace(**(FIELDS | {"model_id": "a", "weights": "bc"}))
    assert one.digest != other.digest


def test_namespace_refuses_unknown_fields_and_empty_models():
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert(FIELDS | {"rank": 0}, Namespace)
    with pytest.raises(ConfigError, match="model id"):
        Namespace(**(FIELDS | {"model_id": ""}))
    with pytest.raises(ConfigError, match="page size, got 0"):
        Namespace(**(FIELDS | {"page_size": 0}))


def test_name_has_the_documented_form():
    name = shard_name(b"\xab" * 32, "hc1-0123456789abcdef", Shard(LayerSpan(30, 60), 3, 0, 1))
    assert name == "ab" * 32 + "_hc1-0123456789abcdef_L30-60_H3"


@given(
    page_hash=st.binary(min_size=32, max_size=32),
    digest=st.binary(min_size=8, max_size=8),
    start=st.integers(0, 10_000),
    num_layers=st.integers(1, 10_000),
    head_group=st.integers(0, 10_000),
    pool=st.just("") | st.integers(1, 2**32 - 1).map("{:08x}".format),
)
def test_name_tells_back_what_made_it(page_hash, digest, start, num_layers, head_group, pool):
    span, namespace = LayerSpan(start, start + num_layers), f"hc1-{digest.hex()}"
    name = shard_name(page_hash, namespace, Shard(span, head_group, 0, 1, pool))
    assert parse_shard_name(name) == ShardName(page_hash, namespace, span, head_group, pool)
    assert namespace_of(name) == namespace


def test_the_name_of_another_pool_than_the_first_ends_with_it():
    shard = Shard(LayerSpan(30, 60), 3, 0, 1, "89abcdef")
    name = shard_name(b"\xab" * 32, "hc1-0123456789abcdef", shard)
    assert name == "ab" * 32 + "_hc1-0123456789abcdef_L30-60_H3_P89abcdef"
    assert name == "ab" * 32 + shard_ending("hc1-0123456789abcdef", shard)


@pytest.mark.parametrize("pool", ["0" * 8, "1", "89ABCDEF", "89abcdefa", "89abcdeg", "_9abcdef"])
def test_a_pool_that_no_header_can_hold_breaks_an_invariant(pool):
    with pytest.raises(InvariantBroken, match="8 hex digits"):
        shard_name(b"x" * 32, "hc1-0123456789abcdef", Shard(LayerSpan(0, 1), 0, 0, 1, pool))


GOOD = "ab" * 32 + "_hc1-0123456789abcdef_L30-60_H3"


@pytest.mark.parametrize(
    "name",
    [
        "",
        GOOD.upper(),
        GOOD + "\n",
        GOOD + ".tmp",
        "x" + GOOD,
        GOOD.replace("hc1", "hc2"),
        GOOD.replace("_H3", ""),
        GOOD.replace("H3", "H03"),
        GOOD.replace("L30", "L030"),
        GOOD.replace("L30", "L60"),
        GOOD.replace("H3", "H\u0663"),
        GOOD[2:],
        GOOD + "_P",
        GOOD + "_P" + "0" * 8,
        GOOD + "_P89abcde",
        GOOD + "_P89abcdef0",
        GOOD + "_P89ABCDEF",
        GOOD.replace("_H3", "_P89abcdef"),
        GOOD.replace("_H3", "_P89abcdef_H3"),
    ],
)
def test_foreign_name_is_not_understood(name):
    assert parse_shard_name(GOOD) is not None
    assert parse_shard_name(name) is None


def test_hash_of_the_wrong_size_breaks_an_invariant():
    with pytest.raises(InvariantBroken, match="32 bytes, got 31"):
        shard_name(b"x" * 31, "hc1-0123456789abcdef", Shard(LayerSpan(0, 1), 0, 0, 1))
