"""What doctor computes of a model from its configuration, against numbers worked out by hand."""

import json

import msgspec
import pytest
import torch

from vllm_hicache.connectors.model_geometry import RANDOM_EPOCH, model_geometry
from vllm_hicache.errors import ConfigError

pytestmark = [pytest.mark.services, pytest.mark.vllm]

TRANSFER = {
    "kv_connector": "HiCacheConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
BY_HAND = {
    "model_id": "LlamaForCausalLM",
    "dtype": "float32",
    "kv_scales": "none",
    "page_size": 64,
    "group_kind": "full_attention",
    "window": 0,
    "total_kv_heads": 2,
    "heads_per_group": 1,
    "layer_partition": 0,
    "k_row_bytes": 64 * 4,
    "v_row_bytes": 64 * 4,
    "object_layout": "hicache-page-1",
    "token_packing": "rows",
    "hash_version": 1,
    "epoch": "",
}
"""Of the tiny Llama: 4 layers, 2 KV heads of 64 numbers."""

WINDOWED = {"sliding_window": 512}
INTERLEAVED = WINDOWED | {"layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.fixture(scope="module")
def look(tiny_llama):
    def look_at(*arguments, dtype="float32", **options):
        extra = {"page_size": 64, "min_object_bytes": 1, "storage": "file:///nowhere", **options}
        transfer = json.dumps({**TRANSFER, "kv_connector_extra_config": extra})
        given = ["--dtype", dtype, "--max-model-len", "4096", "--skip-tokenizer-init", *arguments]
        return model_geometry(str(tiny_llama()), transfer, given)

    return look_at


def fields(geometry):
    return msgspec.to_builtins(geometry.namespace)


@pytest.fixture(scope="module")
def alone(look):
    return look("--block-size", "32")


def test_one_worker_stores_what_was_worked_out_by_hand(alone):
    found = fields(alone)
    assert {name: found[name] for name in BY_HAND} == BY_HAND
    assert found["weights"].startswith("sample:")
    assert alone.is_proven
    # A page of 64 tokens x 4 layers x 1 head x 512 bytes, two of them a page.
    assert alone.smallest_object_bytes == 64 * 4 * 512
    assert "objects of 128 KiB, 31.2 for 1,000 tokens" in alone.objects
    assert alone.num_workers == 1


@pytest.mark.parametrize(
    ("arguments", "num_workers", "num_layers"),
    [
        (("--tensor-parallel-size", "2"), 2, 4),
        (("--pipeline-parallel-size", "2"), 2, 2),
        (("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"), 4, 2),
    ],
)
def test_a_share_of_the_heads_or_layers_keeps_the_namespace(
    look, alone, arguments, num_workers, num_layers
):
    found = look(*arguments)
    assert found.namespace.digest == alone.namespace.digest
    assert found.smallest_object_bytes == 64 * num_layers * 512
    assert found.num_workers == num_workers


def test_block_size_is_no_part_of_the_namespace(look, alone):
    assert look("--block-size", "64").namespace == alone.namespace


def test_a_fleet_gives_every_engine_the_same_grid(look):
    fleet = {"tp": [1, 2], "pp": [1, 2]}
    digests = set()
    for sizes in ((1, 1), (2, 1), (1, 2), (2, 2)):
        arguments = ("--tensor-parallel-size", str(sizes[0]))
        found = look(*arguments, "--pipeline-parallel-size", str(sizes[1]), fleet=fleet)
        assert (found.namespace.layer_partition, found.namespace.heads_per_group) == (2, 1)
        assert found.smallest_object_bytes == 64 * 2 * 512
        digests.add(found.namespace.digest)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "field"),
    [
        ((), {"page_size": 128}, "page_size"),
        ((), {"storage_layer_partition": 2}, "layer_partition"),
        ((), {"storage_head_partition": 2}, "heads_per_group"),
        ((), {"weights_id": "mine"}, "weights"),
    ],
)
def test_an_option_changes_its_field_alone(look, alone, arguments, options, field):
    found, before = fields(look(*arguments, **options)), fields(alone)
    assert {name for name in before if found[name] != before[name]} == {field}


def test_another_dtype_changes_rows_and_weights(look, alone):
    found, before = fields(look(dtype="bfloat16")), fields(alone)
    changed = {name for name in before if found[name] != before[name]}
    expected = {"dtype", "k_row_bytes", "v_row_bytes", "weights"}
    if torch.cpu._is_amx_tile_supported():  # vLLM packs bfloat16 otherwise there, and only that
        expected.add("token_packing")
    assert changed == expected


def test_another_rope_changes_its_digest(look, alone):
    overrides = json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    found, before = fields(look("--hf-overrides", overrides)), fields(alone)
    changed = {name for name in before if found[name] != before[name]}
    assert changed == {"rope", "weights"}  # overrides are part of the fingerprint, too


def test_weights_that_nobody_can_prove_have_no_lasting_namespace(look):
    found = look("--load-format", "dummy")
    assert not found.is_proven
    assert found.namespace.epoch == RANDOM_EPOCH


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("--tensor-parallel-size", "4"), {}, "2 KV heads over tensor parallelism 4"),
        (("--pipeline-parallel-size", "2"), {"storage_layer_partition": 3}, "3"),
        ((), {"storage_head_partition": 4}, "4"),
        (("--hf-overrides", json.dumps(WINDOWED)), {}, "sliding-window"),
        (("--hf-overrides", json.dumps(INTERLEAVED)), {}, "sliding-window"),
        (("--max-model-len", "999999"), {}, "vLLM refuses"),
        ((), {"page_sise": 1}, "page_sise"),
    ],
)
def test_what_no_engine_would_start_with_is_refused(look, arguments, options, said):
    with pytest.raises(ConfigError, match=said):
        look(*arguments, **options)


def test_a_drafter_changes_nothing_of_what_the_model_stores(look, alone, tiny_llama):
    drafter = str(tiny_llama(num_layers=2))
    drafting = {"model": drafter, "method": "draft_model", "num_speculative_tokens": 2}
    found = look("--block-size", "32", "--speculative-config", json.dumps(drafting))
    assert found == alone


def test_a_window_that_no_layer_uses_does_not_count(look, alone):
    unused = {"sliding_window": None, "layer_types": ["full_attention"] * 4}
    found = look("--hf-overrides", json.dumps(unused))
    assert found.namespace.window == 0
    assert found.smallest_object_bytes == alone.smallest_object_bytes


def test_a_model_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="vLLM refuses"):
        model_geometry(str(tmp_path / "nothing"), json.dumps(TRANSFER), [])
