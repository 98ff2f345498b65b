"""A namespace of a tiny model; tests change the fields that they are about."""

from vllm_hicache.keys import Namespace

SAMPLE = Namespace(
    model_id="LlamaForCausalLM",
    weights="given:tiny",
    dtype="bfloat16",
    kv_scales="none",
    page_size=64,
    rope="rope-1",
    group_kind="full_attention",
    window=0,
    total_kv_heads=8,
    heads_per_group=1,
    layer_partition=0,
    k_row_bytes=256,
    v_row_bytes=256,
    token_packing="rows",
    epoch="",
)
