"""Which model computed the KV: fingerprints of weights, rotary embedding and LoRA adapters.

A fingerprint that cannot be proven is None (weights) or never repeats (adapters); the pages of
such an engine are then not shared with any other.
"""

import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec
from huggingface_hub import try_to_load_from_cache
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")

# Load formats that read the files of the model's folder; others take weights from elsewhere.
_FOLDER_FORMATS = frozenset(
    (
        "auto",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "safetensors",
    )
)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Small files that change what the model computes from a prompt; tokenizers do not: keys are over
# token ids.
_SMALL_FILES = frozenset(
    (
        "config.json",
        "params.json",
        "hf_quant_config.json",
        "quantize_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    )
)

# Pieces read of each weight file. A training run touches all of a tensor, so that a few bytes of
# many tensors tell more than many bytes of a few. 100 files cost about 40 ms when cached.
_PIECE_BYTES = 64 << 10
_TENSOR_BYTES = 4 << 10
_MAX_TENSORS = 32
_WHOLE_BYTES = 256 << 10
_MAX_HEADER_BYTES = 100 << 20

_ROPE_WORDS = ("rope", "rotary")
_ROPE_FIELDS = frozenset(("max_position_embeddings", "original_max_position_embeddings"))


def weights_fingerprint(vllm_config: VllmConfig) -> str | None:
    """What two engines must share for the same tokens to give the same KV; None if unproven.

    The Hugging Face commit where it is known (snapshot folder or resolved revision), else a hash
    over names, sizes, headers and samples of the checkpoint's files, which is the same on every
    host with the same files. Model dtype, quantization and config overrides are part of it; a
    drafter is not: it decides which tokens are tried, not what their KV is. None for dummy weights,
    for loaders that take weights from elsewhere than the model's folder, and for files that cannot
    be read.
    """
    if str(vllm_config.load_config.load_format) not in _FOLDER_FORMATS:
        return None
    model = vllm_config.model_config
    return _model_fingerprint(model, model.hf_overrides)


def draft_fingerprint(vllm_config: VllmConfig) -> str | None:
    """The same of the drafter's weights; None if unproven or where no model drafts."""
    speculative = vllm_config.speculative_config
    if speculative is None or str(vllm_config.load_config.load_format) not in _FOLDER_FORMATS:
        return None
    draft = speculative.draft_model_config
    if draft is None:
        return None
    return _model_fingerprint(draft, _draft_overrides(draft.hf_overrides))


def _draft_overrides(overrides: object) -> object:
    """Without vLLM's own rewriting of a drafter's config, which depends on that config alone and,
    since vLLM 0.33, on values given with it."""
    known = SpeculativeConfig.hf_config_override
    if isinstance(overrides, partial) and overrides.func is known and not overrides.args:
        return {name: value for name, value in overrides.keywords.items() if value is not None}
    return None if overrides is known else overrides


def rope_identity(hf_config: object, *, max_model_len: int | None = None) -> str:
    """Digest of every rotary-embedding field of a Hugging Face config and its nested configs.

    With ``max_model_len``, also whether vLLM uses the long factors of a "longrope" model: it
    decides so by comparing with ``original_max_position_embeddings``.
    """
    fields = dict(_rope_fields(_as_mapping(hf_config), ""))
    if max_model_len is not None:
        originals = [v for k, v in fields.items() if k.endswith("original_max_position_embeddings")]
        fields["long"] = [isinstance(v, int) and max_model_len > v for v in originals]
    text = json.dumps(fields, sort_keys=True, default=str)
    return "rope-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def lora_identity(lora_request: LoRARequest) -> bytes:
    """32 bytes that name the content of an adapter's files, wherever they lie.

    The files are read once, whole (0.1 s for 150 MB); later calls compare names, times and sizes.
    An adapter without local files gets bytes that no other process will ever use; one whose files
    changed under the running engine gets new bytes at every call, since vLLM may load the new
    files at any moment and does not tell.
    """
    return _adapters.identity(lora_request)


def _model_fingerprint(model: ModelConfig, overrides: object) -> str | None:
    source = _weights_source(model)
    if source is None or not isinstance(overrides, Mapping | None):
        return None
    parts = [source, f"dtype={model.dtype}", f"quantization={model.quantization}"]
    if overrides:
        text = json.dumps(dict(overrides), sort_keys=True, default=str)
        parts.append(f"overrides={hashlib.sha256(text.encode()).hexdigest()[:16]}")
    return ";".join(parts)


def _weights_source(model: ModelConfig) -> str | None:
    path = Path(model.model_weights or model.model).expanduser()
    if not path.exists():
        # A name on the Hub. A resolved revision carries the commit that its branch pointed to.
        commit = str(getattr(model.revision, "resolved", model.revision))
        known = not model.model_weights and _COMMIT.fullmatch(commit)
        return f"commit:{commit}" if known else None
    if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name):
        return f"commit:{path.name}"
    try:
        digest = _sample_checkpoint(path)
    except OSError as error:
        logger.warning("weights in %s cannot be read, their pages stay private: %s", path, error)
        return None
    return f"sample:{digest}" if digest else None


def _sample_checkpoint(path: Path) -> str | None:
    """Digest of one weight file, or of all files of a folder that matter; None without weights."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if _matters(p))
    for file in files:
        if not file.is_file():
            raise OSError(f"{file.name} is no regular file")  # such as a link to a missing blob
    weights = [p for p in files if p.suffix in _WEIGHT_SUFFIXES]
    safetensors = [p for p in weights if p.suffix == ".safetensors"]
    weights = safetensors or weights  # vLLM, too, takes the others only where these are missing
    if not weights:
        return None
    digest = hashlib.sha256()
    for file in files:
        if file.suffix not in _WEIGHT_SUFFIXES:
            _add_record(digest, file.name, file.read_bytes())
    for file in weights:
        _add_record(digest, file.name, *_sampled_pieces(file))
    return digest.hexdigest()[:32]


def _matters(file: Path) -> bool:
    return file.name in _SMALL_FILES or file.suffix == ".py" or file.suffix in _WEIGHT_SUFFIXES


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def _add_record(digest: _Digest, name: str, *pieces: bytes) -> None:
    """Add a name and pieces with their lengths, so that no two records can run together."""
    for piece in (name.encode(), len(pieces).to_bytes(8, "little"), *pieces):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)


def _sampled_pieces(file: Path) -> Iterator[bytes]:
    """Size, header (safetensors) and samples of a weight file, in a fixed order."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        yield size.to_bytes(8, "little")
        if size <= _WHOLE_BYTES:
            yield os.pread(descriptor, size, 0)
            return
        header = _read_header(descriptor, size) if file.suffix == ".safetensors" else b""
        yield header
        start = len(header)
        num_pieces = 3 if header else 16
        last = max(start, size - _PIECE_BYTES)
        for i in range(num_pieces):
            yield os.pread(descriptor, _PIECE_BYTES, start + (last - start) * i // (num_pieces - 1))
        for middle in _tensor_middles(header):
            yield os.pread(descriptor, _TENSOR_BYTES, start + middle)
    finally:
        os.close(descriptor)


def _read_header(descriptor: int, size: int) -> bytes:
    """Length prefix and JSON header of a safetensors file; empty if it is none."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
        return b""
    return os.pread(descriptor, 8 + length, 0)


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)


_decode_header = msgspec.json.Decoder(dict[str, _Tensor]).decode


def _tensor_middles(header: bytes) -> list[int]:
    """Offsets, from the end of the header, of the middles of up to 32 tensors, evenly chosen."""
    if not header:
        return []
    try:
        tensors = _decode_header(header[8:])
    except msgspec.DecodeError:
        return []
    spans = sorted(tensor.data_offsets for tensor in tensors.values())
    step = max(1, len(spans) / _MAX_TENSORS)
    chosen = [spans[int(i * step)] for i in range(min(_MAX_TENSORS, len(spans)))]
    return [(begin + end) // 2 for begin, end in chosen]


def _as_mapping(config: object) -> Mapping[str, object]:
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    fields: Mapping[str, object] = to_dict() if to_dict is not None else vars(config)
    return fields


def _rope_fields(config: Mapping[str, object], path: str) -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        name = str(key)
        if name in _ROPE_FIELDS or any(word in name for word in _ROPE_WORDS):
            yield path + name, value
        if isinstance(value, Mapping):
            yield from _rope_fields(value, f"{path}{name}.")


_Stamp: TypeAlias = tuple[tuple[str, int, int], ...]  # name, mtime_ns, size of each file


class _Adapters:
    """Adapters seen by this process. What vLLM loaded first is what a folder stands for."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}  # path of a request -> folder
        self._known: dict[str, tuple[_Stamp, bytes]] = {}  # folder -> its first files, identity
        self._changed: set[str] = set()

    def identity(self, request: LoRARequest) -> bytes:
        folder = self._folders.get(request.lora_path)
        if folder is None:
            folder = self._folders[request.lora_path] = _adapter_folder(request.lora_path)
        try:
            stamp = _stamp(folder)
            if folder not in self._known:
                self._known[folder] = (stamp, _first_identity(folder, stamp))
        except OSError as error:
            logger.warning("adapter %s cannot be read: %s", folder, error)
            return secrets.token_bytes(32)
        first_stamp, identity = self._known[folder]
        if stamp != first_stamp and folder not in self._changed:
            logger.warning(
                "the files of adapter %s have changed: its KV is not kept any more, since vLLM "
                "may use the old weights or the new ones; load new weights from a new path",
                request.lora_path,
            )
            self._changed.add(folder)
        return secrets.token_bytes(32) if folder in self._changed else identity


def _first_identity(folder: str, stamp: _Stamp) -> bytes:
    if stamp:
        return _content(folder, stamp)
    logger.warning("adapter %s has no local files: its KV is not shared", folder)
    return secrets.token_bytes(32)


def _adapter_folder(path: str) -> str:
    """Local folder of an adapter: the path itself, else its snapshot in the Hugging Face cache."""
    folder = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(folder) or os.path.isabs(path):
        return folder
    try:
        cached = try_to_load_from_cache(path, "adapter_config.json")
    except ValueError:  # not a name of the Hub
        return folder
    return os.path.dirname(cached) if isinstance(cached, str) else folder


def _stamp(folder: str) -> _Stamp:
    """Name, mtime_ns and size of an adapter's files; empty where there is no such folder."""
    if not os.path.isdir(folder):
        return ()
    stats = [(entry.name, entry.stat()) for entry in os.scandir(folder) if entry.is_file()]
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))


def _content(folder: str, stamp: _Stamp) -> bytes:
    """Digest of the adapter's configuration and weights, every byte of them."""
    digest = hashlib.sha256()
    for name, _, _ in stamp:
        if name.endswith(_WEIGHT_SUFFIXES) or name == "adapter_config.json":
            with open(os.path.join(folder, name), "rb") as file:
                _add_record(digest, name, hashlib.file_digest(file, "sha256").digest())
    return digest.digest()


_adapters = _Adapters()
