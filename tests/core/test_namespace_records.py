"""A record proves itself, every field that differs is a miss and is named, and near is near."""

import msgspec
import pytest
from sample_namespace import SAMPLE

from vllm_hicache.keys import Namespace
from vllm_hicache.metrics import Metrics
from vllm_hicache.namespace_records import (
    ABSENT,
    MAX_NEAR,
    Difference,
    decode_record,
    differences,
    encode_record,
    near_miss_line,
    near_misses,
    neighbours,
    record_digest,
)
from vllm_hicache.near_miss_notice import NearMissNotice
from vllm_hicache.storage import MAX_RECORD_BYTES

OWN = msgspec.structs.replace(SAMPLE, weights="commit:0123;dtype=torch.bfloat16;quantization=None")
CHANGES = {
    "format_version": 9,
    "model_id": "QwenForCausalLM",
    "weights": "commit:4567;dtype=torch.bfloat16;quantization=None",
    "dtype": "fp8_e4m3",
    "kv_scales": "checkpoint",
    "page_size": 128,
    "rope": "rope-2",
    "group_kind": "sliding_window",
    "window": 4096,
    "total_kv_heads": 4,
    "heads_per_group": 2,
    "layer_partition": 16,
    "k_row_bytes": 128,
    "v_row_bytes": 128,
    "object_layout": "hicache-page-2",
    "token_packing": "cpu-amx",
    "hash_version": 2,
    "epoch": "5f",
}
QUANTISED = "commit:0123;dtype=torch.bfloat16;quantization=awq"


def changed(**fields):
    return msgspec.structs.replace(OWN, **fields)


def stored(*namespaces):
    return {one.digest: encode_record(one) for one in namespaces}


def near_to_own(*namespaces):
    return near_misses(encode_record(OWN), stored(*namespaces))


def test_every_field_of_a_namespace_is_changed_here():
    assert list(CHANGES) == list(Namespace.__struct_fields__)


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_of_one_field_is_a_miss_and_is_named(field):
    other = changed(**{field: CHANGES[field]})
    assert other.digest != OWN.digest
    (found,) = neighbours(encode_record(OWN), stored(OWN, other))
    assert found.digest == other.digest
    assert found.differences == (Difference(field, getattr(OWN, field), CHANGES[field]),)


@pytest.mark.parametrize("field", [field for field in CHANGES if field != "model_id"])
def test_one_changed_field_of_the_same_model_is_a_near_miss(field):
    (near,) = near_to_own(changed(**{field: CHANGES[field]}))
    line = near_miss_line([near])
    assert f"this engine uses {field}=" in line
    assert f"the store holds objects of the same model with {field}={CHANGES[field]}" in line


def test_the_line_names_both_values_and_the_namespace():
    other = changed(page_size=128)
    assert near_miss_line(near_to_own(other)) == (
        "HiCache storage: 0 hits so far; this engine uses page_size=64, the store holds objects of "
        f"the same model with page_size=128 (namespace {other.digest})"
    )


def test_quantised_weights_of_the_same_checkpoint_are_near_whatever_follows_from_it():
    other = changed(weights=QUANTISED, dtype="fp8", kv_scales="checkpoint", k_row_bytes=128)
    (near,) = near_to_own(other)
    assert [d.field for d in near.differences] == ["weights", "dtype", "kv_scales", "k_row_bytes"]


def test_another_checkpoint_that_differs_in_more_is_another_model():
    assert near_to_own(changed(weights=CHANGES["weights"], rope="rope-2"))
    assert not near_to_own(changed(weights=CHANGES["weights"], rope="rope-2", page_size=128))


def test_another_architecture_is_never_near():
    assert near_to_own(changed(model_id="QwenForCausalLM")) == []


def test_one_s_own_record_is_no_neighbour():
    assert neighbours(encode_record(OWN), stored(OWN)) == []


def test_the_nearest_records_come_first_and_not_too_many():
    close = [changed(page_size=size) for size in (16, 32)]
    far = [changed(page_size=128, heads_per_group=heads) for heads in (2, 4)]
    other = changed(weights=CHANGES["weights"])
    found = near_to_own(other, *far, *close)
    assert found == near_to_own(*close, *far, other)
    assert len(found) == MAX_NEAR
    assert {one.digest for one in found[:2]} == {one.digest for one in close}
    assert found[2].digest in {one.digest for one in far}
    assert near_miss_line(found).count("(namespace ") == MAX_NEAR


def test_a_record_survives_and_proves_its_digest():
    record = encode_record(OWN)
    assert decode_record(OWN.digest, record) == msgspec.to_builtins(OWN)
    assert record_digest(record) == OWN.digest
    assert msgspec.json.decode(record, type=Namespace) == OWN


@pytest.mark.parametrize(
    ("digest", "record"),
    [
        (OWN.digest, encode_record(changed(page_size=128))),
        (changed(page_size=128).digest, encode_record(OWN)),
        (OWN.digest, b""),
        (OWN.digest, b"[1]"),
        (OWN.digest, b"\xff"),
        (OWN.digest, b'{"page_size":null}'),
        (OWN.digest, encode_record(OWN) + b" " * MAX_RECORD_BYTES),
        ("hc2-" + OWN.digest[4:], encode_record(OWN)),
        ("../" + OWN.digest, encode_record(OWN)),
    ],
)
def test_what_does_not_prove_itself_is_no_record(digest, record):
    assert decode_record(digest, record) is None
    assert neighbours(encode_record(OWN), {digest: record}) == []


def test_a_record_of_a_later_version_is_read_and_its_new_field_named():
    fields = {**msgspec.to_builtins(OWN), "format_version": 2, "rotation": "left"}
    record = msgspec.json.encode(fields)
    (found,) = near_misses(encode_record(OWN), {record_digest(record): record})
    assert found.differences == (
        Difference("format_version", 1, 2),
        Difference("rotation", ABSENT, "left"),
    )
    assert differences(fields, msgspec.to_builtins(OWN))[1].there == ABSENT


def test_what_a_stranger_wrote_cannot_break_a_line_of_the_log():
    other = changed(rope="x\nERROR forged " + "y" * 500)
    line = near_miss_line(near_to_own(other))
    assert "\n" not in line
    assert len(line) < 500


def test_the_same_finding_is_said_once(caplog):
    metrics = Metrics()
    notice = NearMissNotice(encode_record(OWN), metrics)
    first, second = changed(page_size=128), changed(page_size=32)
    notice.tell([])
    for _ in range(3):
        notice.tell([encode_record(first)])
    notice.tell([encode_record(second)])
    said = [record.getMessage() for record in caplog.records]
    assert said == [near_miss_line(near_to_own(one)) for one in (first, second)]
    assert metrics.totals()["near_misses"] == 2
