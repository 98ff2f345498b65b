"""Fingerprints of weights, rotary embedding and adapters on small real files."""

import functools
import json
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import LlamaConfig
from vllm.config import SpeculativeConfig
from vllm.lora.request import LoRARequest

from vllm_hicache.connectors.model_identity import (
    draft_fingerprint,
    lora_identity,
    rope_identity,
    weights_fingerprint,
)

pytestmark = pytest.mark.vllm

GOLDEN = "sample:84fb04ab1a94ee7eeef0a05240a2b6f6;dtype=torch.bfloat16;quantization=None"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _vllm_config(model, *, load_format="auto", draft=None, **changes):
    """The few attributes that a fingerprint reads; building a whole VllmConfig takes seconds."""
    fields = {
        "model": str(model),
        "model_weights": "",
        "revision": None,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "hf_overrides": {},
    }
    target = SimpleNamespace(**{**fields, **changes})
    speculative = None
    if draft is not None:
        speculative = SimpleNamespace(
            draft_model_config=SimpleNamespace(**{**fields, "model": str(draft)})
        )
    return SimpleNamespace(
        model_config=target,
        load_config=SimpleNamespace(load_format=load_format),
        speculative_config=speculative,
    )


def _write_checkpoint(folder, *, num_files=3, seed=0, rows=256):
    """Files of 8 tensors of rows x 64 float32 each (512 KiB a file by default)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1e4}))
    random = np.random.default_rng(seed)
    for i in range(num_files):
        tensors = {
            f"layers.{i}.tensor_{j}": random.standard_normal((rows, 64), dtype=np.float32)
            for j in range(8)
        }
        save_file(tensors, folder / f"model-{i:05}-of-{num_files:05}.safetensors")
    return folder


def _flip(path, offset):
    """Change one byte in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def _data_start(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_equal_files_in_another_folder_have_the_same_fingerprint(tmp_path):
    a = weights_fingerprint(_vllm_config(_write_checkpoint(tmp_path / "a")))
    b = weights_fingerprint(_vllm_config(_write_checkpoint(tmp_path / "b")))
    assert a == b
    assert a.startswith("sample:")
    c = weights_fingerprint(_vllm_config(_write_checkpoint(tmp_path / "c", seed=1)))
    assert c != a


def test_fingerprint_of_given_bytes_never_changes(tmp_path):
    """Another value would make every stored page of every unchanged model unreachable."""
    (tmp_path / "config.json").write_text("{}")
    tensors = {f"t{i}": np.arange(i, i + 40_000, dtype=np.float32) for i in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert weights_fingerprint(_vllm_config(tmp_path)) == GOLDEN


@pytest.mark.parametrize("file_index", [0, 1, 2])
def test_change_of_any_weight_file_changes_the_fingerprint(tmp_path, file_index):
    folder = _write_checkpoint(tmp_path / "a")
    config = _vllm_config(folder)
    seen = {weights_fingerprint(config)}
    file = sorted(folder.glob("*.safetensors"))[file_index]
    size = file.stat().st_size
    start = _data_start(file)
    tensor_bytes = (size - start) // 8
    positions = {
        "name of a tensor in the header": 8 + file.read_bytes()[8:].index(b"tensor_"),
        "first byte of the data": start,
        "last byte of the file": size - 1,
        "middle of the data": start + (size - start) // 2,
        **{f"middle of tensor {j}": start + j * tensor_bytes + tensor_bytes // 2 for j in range(8)},
    }
    for what, offset in positions.items():
        _flip(file, offset)
        fingerprint = weights_fingerprint(config)
        assert fingerprint not in seen, what
        seen.add(fingerprint)
    with file.open("ab") as grown:
        grown.write(b"\0")
    assert weights_fingerprint(config) not in seen


def test_added_removed_and_renamed_weight_files_change_the_fingerprint(tmp_path):
    folder = _write_checkpoint(tmp_path / "a")
    config = _vllm_config(folder)
    files = sorted(folder.glob("*.safetensors"))
    seen = [weights_fingerprint(config)]
    files[0].rename(folder / "renamed.safetensors")
    seen.append(weights_fingerprint(config))
    (folder / "renamed.safetensors").unlink()
    seen.append(weights_fingerprint(config))
    (folder / "more.safetensors").write_bytes(files[1].read_bytes())
    seen.append(weights_fingerprint(config))
    assert len(set(seen)) == len(seen)


def test_configuration_and_code_count_but_tokenizer_and_readme_do_not(tmp_path):
    folder = _write_checkpoint(tmp_path / "a")
    config = _vllm_config(folder)
    before = weights_fingerprint(config)
    (folder / "README.md").write_text("hello")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    assert weights_fingerprint(config) == before
    (folder / "modeling_own.py").write_text("x = 1\n")
    with_code = weights_fingerprint(config)
    assert with_code != before
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 2e4}))
    assert weights_fingerprint(config) not in {before, with_code}


def test_checkpoint_without_safetensors_is_sampled_too(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    file = folder / "pytorch_model.bin"
    file.write_bytes(np.random.default_rng(0).bytes(4 << 20))
    config = _vllm_config(folder)
    before = weights_fingerprint(config)
    assert before.startswith("sample:")
    _flip(file, (4 << 20) - 1)
    assert weights_fingerprint(config) != before


def test_broken_safetensors_header_is_sampled_as_plain_bytes(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * (1 << 20))
    config = _vllm_config(folder)
    before = weights_fingerprint(config)
    assert before is not None
    _flip(file, 0)
    assert weights_fingerprint(config) not in {before, None}
    file.write_bytes((16).to_bytes(8, "little") + b"not json at all!" + bytes(1 << 20))
    assert weights_fingerprint(config) not in {before, None}


def test_single_weight_file_is_a_model(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(1 << 20))
    assert weights_fingerprint(_vllm_config(file)).startswith("sample:")


def test_snapshot_folder_gives_its_commit_without_reading_weights(tmp_path):
    folder = tmp_path / "models--org--name" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    fingerprint = weights_fingerprint(_vllm_config(folder))
    assert fingerprint.startswith(f"commit:{COMMIT};")


def test_revision_that_is_a_commit_proves_a_model_of_the_hub(tmp_path):
    by_commit = weights_fingerprint(_vllm_config("org/name", revision=COMMIT))
    assert by_commit.startswith(f"commit:{COMMIT};")
    assert weights_fingerprint(_vllm_config("org/name", revision="main")) is None
    assert weights_fingerprint(_vllm_config("org/name")) is None
    # vLLM ignores the revision of a local folder, so it proves nothing there.
    folder = _write_checkpoint(tmp_path / "a")
    local = weights_fingerprint(_vllm_config(folder, revision=COMMIT))
    assert local.startswith("sample:")


def test_branch_that_vllm_resolved_gives_its_commit():
    class Resolved(str):
        __slots__ = ("resolved",)

    revision = Resolved("main")
    revision.resolved = COMMIT
    fingerprint = weights_fingerprint(_vllm_config("org/name", revision=revision))
    assert fingerprint.startswith(f"commit:{COMMIT};")


def test_resolved_revision_of_the_installed_hub_client_carries_the_commit():
    revision = pytest.importorskip("huggingface_hub._revision").ResolvedRevision(
        COMMIT, initial="main", repo_id="org/name", repo_type="model"
    )
    assert weights_fingerprint(_vllm_config("org/name", revision=revision)).startswith(
        f"commit:{COMMIT};"
    )


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "ipc_cache", "own_plugin"])
def test_weights_from_elsewhere_are_not_proven(tmp_path, load_format):
    folder = _write_checkpoint(tmp_path / "a")
    assert weights_fingerprint(_vllm_config(folder, load_format=load_format)) is None


def test_weights_in_an_object_store_are_not_proven(tmp_path):
    folder = _write_checkpoint(tmp_path / "a")
    config = _vllm_config(folder, model_weights="s3://bucket/model", revision=COMMIT)
    assert weights_fingerprint(config) is None


def test_folder_without_weights_is_not_proven(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert weights_fingerprint(_vllm_config(tmp_path)) is None


@pytest.mark.parametrize("name", ["model-2.safetensors", "config.json", "modeling_own.py"])
def test_files_that_cannot_be_read_prove_nothing(tmp_path, name):
    folder = _write_checkpoint(tmp_path / "a")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "missing blob")
    assert weights_fingerprint(_vllm_config(folder)) is None
    os.mkfifo(tmp_path / "missing blob")  # opening it would block for ever
    assert weights_fingerprint(_vllm_config(folder)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
        {"hf_overrides": {"num_hidden_layers": 2}},
    ],
)
def test_what_changes_the_computation_changes_the_fingerprint(tmp_path, changes):
    folder = _write_checkpoint(tmp_path / "a")
    before = weights_fingerprint(_vllm_config(folder))
    after = weights_fingerprint(_vllm_config(folder, **changes))
    assert after is not None
    assert after != before


def test_a_drafter_leaves_the_targets_fingerprint_as_it_is(tmp_path):
    folder = _write_checkpoint(tmp_path / "a")
    alone = weights_fingerprint(_vllm_config(folder))
    assert alone is not None
    draft = _write_checkpoint(tmp_path / "draft", seed=2)
    assert weights_fingerprint(_vllm_config(folder, draft=draft)) == alone
    assert weights_fingerprint(_vllm_config(folder, draft="org/unproven")) == alone


def test_a_drafter_has_a_fingerprint_of_its_own_weights(tmp_path):
    folder = _write_checkpoint(tmp_path / "a")
    drafts = [_write_checkpoint(tmp_path / f"draft{i}", seed=i) for i in (2, 3)]
    first, second = (draft_fingerprint(_vllm_config(folder, draft=draft)) for draft in drafts)
    assert first is not None
    assert second is not None
    assert first != second
    # A drafter in the target's own checkpoint (MTP) is known by that.
    assert draft_fingerprint(_vllm_config(folder, draft=folder)) == weights_fingerprint(
        _vllm_config(folder)
    )


def test_a_drafter_that_is_not_proven_has_no_fingerprint(tmp_path):
    folder = _write_checkpoint(tmp_path / "a")
    assert draft_fingerprint(_vllm_config(folder)) is None
    assert draft_fingerprint(_vllm_config(folder, draft="org/draft")) is None
    assert draft_fingerprint(_vllm_config(folder, draft=folder, load_format="dummy")) is None


def test_vllms_own_rewriting_of_a_drafters_config_is_proven_and_no_other_code_is(tmp_path):
    config = _vllm_config(_write_checkpoint(tmp_path / "a"), draft=tmp_path / "a")
    plain = draft_fingerprint(config)
    assert plain is not None
    draft = config.speculative_config.draft_model_config
    # vLLM sets this one for all drafters of a target whose overrides are no code.
    draft.hf_overrides = SpeculativeConfig.compose_draft_hf_overrides({"rope_theta": 1e4})
    assert draft_fingerprint(config) == plain
    rewriting = SpeculativeConfig.hf_config_override
    draft.hf_overrides = functools.partial(rewriting, given=None)  # as vLLM 0.33 does
    assert draft_fingerprint(config) == plain
    draft.hf_overrides = functools.partial(rewriting, given={"num_nextn_predict_layers": 2})
    assert draft_fingerprint(config) not in (plain, None)
    draft.hf_overrides = SpeculativeConfig.compose_draft_hf_overrides(lambda config: config)
    assert draft_fingerprint(config) is None


def test_overrides_that_are_code_are_not_proven(tmp_path):
    folder = _write_checkpoint(tmp_path / "a")
    assert weights_fingerprint(_vllm_config(folder, hf_overrides=lambda config: config)) is None


def test_hundred_weight_files_take_less_than_a_tenth_of_a_second(tmp_path):
    config = _vllm_config(_write_checkpoint(tmp_path / "a", num_files=100))
    fastest = 1e9
    for _ in range(5):
        start = time.process_time()
        assert weights_fingerprint(config) is not None
        fastest = min(fastest, time.process_time() - start)
    assert fastest < 0.1


def test_rope_identity_follows_every_rope_field():
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    variants = [
        LlamaConfig(rope_parameters=plain),
        LlamaConfig(rope_parameters={**plain, "rope_theta": 500000.0}),
        LlamaConfig(rope_parameters={**plain, "rope_type": "linear", "factor": 2.0}),
        LlamaConfig(rope_parameters=plain, max_position_embeddings=4096),
        {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 10000.0},
        {"text_config": {"rope_theta": 10000.0}},
        {"text_config": {"rope_theta": 20000.0}},
    ]
    identities = [rope_identity(config) for config in variants]
    assert len(set(identities)) == len(identities)
    assert identities[0] == rope_identity(LlamaConfig(rope_parameters=plain))


def test_rope_identity_ignores_other_fields_and_their_order():
    config = {"rope_theta": 1e4, "max_position_embeddings": 2048, "vocab_size": 10}
    other = {"vocab_size": 20, "max_position_embeddings": 2048, "rope_theta": 1e4}
    assert rope_identity(config) == rope_identity(other)
    assert rope_identity(SimpleNamespace(**config)) == rope_identity(config)


def test_rope_identity_knows_when_long_factors_are_used():
    config = {
        "rope_parameters": {"rope_type": "longrope"},
        "original_max_position_embeddings": 4096,
    }
    assert rope_identity(config, max_model_len=2048) == rope_identity(config, max_model_len=4096)
    assert rope_identity(config, max_model_len=4096) != rope_identity(config, max_model_len=4097)
    plain = {"rope_theta": 1e4}
    assert rope_identity(plain, max_model_len=1) == rope_identity(plain, max_model_len=10**6)


def _write_adapter(folder, *, seed=0):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    random = np.random.default_rng(seed)
    weights = {"lora_A": random.standard_normal((8, 64), dtype=np.float32)}
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def _request(path, name="adapter", number=1):
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(path))


def test_adapter_is_its_content_not_its_name_or_place(tmp_path):
    a, b = _write_adapter(tmp_path / "a"), _write_adapter(tmp_path / "b")
    c = _write_adapter(tmp_path / "c", seed=1)
    assert lora_identity(_request(a)) == lora_identity(_request(b, name="other", number=2))
    assert lora_identity(_request(a)) != lora_identity(_request(c))
    assert len(lora_identity(_request(a))) == 32


def test_adapter_configuration_is_part_of_its_identity(tmp_path):
    a, b = _write_adapter(tmp_path / "a"), _write_adapter(tmp_path / "b")
    (b / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')
    assert lora_identity(_request(a)) != lora_identity(_request(b))


def test_adapter_files_are_read_once(tmp_path):
    a = _write_adapter(tmp_path / "a")
    first = lora_identity(_request(a))
    file = a / "adapter_model.safetensors"
    stat = file.stat()
    _flip(file, stat.st_size - 1)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert lora_identity(_request(a)) == first


def test_adapter_that_changes_under_the_engine_is_shared_with_nobody(tmp_path):
    a, b = _write_adapter(tmp_path / "a"), _write_adapter(tmp_path / "b", seed=1)
    first = lora_identity(_request(a))
    file = a / "adapter_model.safetensors"
    file.write_bytes((b / file.name).read_bytes())
    os.utime(file, ns=(1, 1))
    changed = lora_identity(_request(a))
    assert changed not in {first, lora_identity(_request(b))}
    # vLLM may load the new files between any two requests.
    assert lora_identity(_request(a)) != changed
    assert lora_identity(_request(a)) != first


@pytest.mark.parametrize("path", ["/no/such/folder", "org/adapter-that-nobody-has", "not a name"])
def test_adapter_without_local_files_is_private_but_stable_within_the_process(path):
    identity = lora_identity(_request(path))
    assert lora_identity(_request(path)) == identity
    assert lora_identity(_request(path + "-2")) != identity
