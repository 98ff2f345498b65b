"""A stored object is believed only when every byte of it is right."""

import asyncio
import hashlib
import os
import shutil
import struct
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from vllm_hicache.errors import BackendUnavailable, ConfigError, CorruptShard
from vllm_hicache.keys import shard_name
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.storage import HEADER_BYTES, FetchOutcome, ShardObject, WriteOutcome
from vllm_hicache.storage_backends import envelope
from vllm_hicache.storage_backends.envelope import (
    CHECKSUM_BLAKE2B_256_KEYED,
    CHECKSUM_XXH3_128,
    CheckedStorage,
    HeaderCodec,
    RunningChecksum,
    decode_header,
)
from vllm_hicache.storage_backends.file import FileBackend

GOLDEN = Path(__file__).parent.parent / "data" / "object-v1"
GOLDEN_KEYED = Path(__file__).parent.parent / "data" / "object-v1-keyed"
KEY = b"a key of the golden object"

NAMESPACE = "hc1-0123456789abcdef"
OTHER_NAMESPACE = "hc1-fedcba9876543210"


def item_of(number: int, payload: bytes | bytearray, **changes) -> ShardObject:
    """The object that stands for a number; `changes` override its fields, not its name."""
    page_hash = hashlib.sha256(str(number).encode()).digest()
    shard = Shard(LayerSpan(8, 16), 3, 0, len(payload))
    name = shard_name(page_hash, NAMESPACE, shard)
    return replace(ShardObject(name, NAMESPACE, page_hash, shard, memoryview(payload)), **changes)


def payload_of(number: int, num_bytes: int) -> bytes:
    return (hashlib.sha256(b"%d" % number).digest() * -(-num_bytes // 32))[:num_bytes]


def of_pool(item: ShardObject, pool: str) -> ShardObject:
    """The same bytes as an object of another pool."""
    shard = replace(item.shard, pool=pool)
    return replace(item, name=shard_name(item.page_hash, NAMESPACE, shard), shard=shard)


@asynccontextmanager
async def opened(root: Path, integrity_key: bytes | None = None):
    storage = CheckedStorage(FileBackend(root), integrity_key=integrity_key)
    await storage.open()
    try:
        yield storage
    finally:
        await storage.close()


def path_of(root: Path, number: int) -> Path:
    name = item_of(number, b"").name
    return root / name[:3] / name


@pytest.fixture(params=[None, b"secret"], ids=["plain", "keyed"])
def key(request):
    return request.param


@pytest.mark.parametrize("num_bytes", [0, 1, 65_536, 65_537, 1_000_000])
async def test_persisted_shard_is_fetched_and_verified(tmp_path, key, num_bytes):
    async with opened(tmp_path, key) as storage:
        item = item_of(1, payload_of(1, num_bytes))
        assert await storage.persist([item]) == [WriteOutcome.STORED]
        assert await storage.persist([item]) == [WriteOutcome.EXISTS]
        buffer = bytearray(num_bytes)
        assert await storage.exists([item.name]) == [True]
        assert await storage.fetch([item_of(1, buffer)]) == [FetchOutcome.OK]
        assert buffer == item.payload
        assert storage.stats()["corrupt_objects"] == 0


def truncate(root):
    os.truncate(path_of(root, 1), path_of(root, 1).stat().st_size - 1)


def extend(root):
    with path_of(root, 1).open("ab") as file:
        file.write(b"\0")


def flip_a_payload_bit(root):
    _flip(path_of(root, 1), HEADER_BYTES + 70_000)


def flip_a_header_bit(root):
    _flip(path_of(root, 1), 60)


def flip_a_bit_of_the_checksum(root):
    _flip(path_of(root, 1), 4065)


def flip_a_bit_of_the_padding(root):
    _flip(path_of(root, 1), 2000)


def swap_with_another_object(root):
    one, two = path_of(root, 1), path_of(root, 2)
    one.rename(root / "aside")
    two.rename(one)
    (root / "aside").rename(two)


def write_with_another_namespace(root):
    item = item_of(1, payload_of(1, 100_000), namespace=OTHER_NAMESPACE)
    path_of(root, 1).write_bytes(HeaderCodec().encode(item) + item.payload)


def make_empty(root):
    os.truncate(path_of(root, 1), 0)


def fill_with_zeros(root):
    size = path_of(root, 1).stat().st_size
    path_of(root, 1).write_bytes(bytes(size))


CORRUPTIONS = [
    truncate,
    extend,
    flip_a_payload_bit,
    flip_a_header_bit,
    flip_a_bit_of_the_checksum,
    flip_a_bit_of_the_padding,
    swap_with_another_object,
    write_with_another_namespace,
    make_empty,
    fill_with_zeros,
]


def _flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x10
    path.write_bytes(raw)


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
async def test_corrupt_object_is_a_miss_and_is_removed_and_counted(tmp_path, key, corrupt):
    async with opened(tmp_path, key) as storage:
        items = [item_of(n, payload_of(n, 100_000)) for n in (1, 2, 3)]
        await storage.persist(items)
        corrupt(tmp_path)
        fetched = [item_of(n, bytearray(100_000)) for n in (1, 2, 3)]
        outcomes = await storage.fetch(fetched)
        num_corrupt = 2 if corrupt is swap_with_another_object else 1
        assert outcomes[:num_corrupt] == [FetchOutcome.CORRUPT] * num_corrupt
        assert outcomes[num_corrupt:] == [FetchOutcome.OK] * (3 - num_corrupt)
        assert storage.stats()["corrupt_objects"] == num_corrupt
        assert not path_of(tmp_path, 1).exists()
        again = await storage.fetch(fetched[:1])
        assert again == [FetchOutcome.MISSING]
        assert await storage.persist(items[:1]) == [WriteOutcome.STORED]
        assert await storage.fetch(fetched[:1]) == [FetchOutcome.OK]
        assert fetched[0].payload == items[0].payload


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": OTHER_NAMESPACE},
        {"page_hash": bytes(32)},
        {"shard": Shard(LayerSpan(9, 16), 3, 0, 100)},
        {"shard": Shard(LayerSpan(8, 17), 3, 0, 100)},
        {"shard": Shard(LayerSpan(8, 16), 4, 0, 100)},
        {"shard": Shard(LayerSpan(8, 16), 3, 0, 100, "89abcdef")},
    ],
    ids=["namespace", "page_hash", "layer_start", "layer_stop", "head_group", "pool"],
)
async def test_object_that_says_to_be_another_is_corrupt(tmp_path, change):
    async with opened(tmp_path) as storage:
        await storage.persist([item_of(1, payload_of(1, 100), **change)])
        assert await storage.fetch([item_of(1, bytearray(100))]) == [FetchOutcome.CORRUPT]


@pytest.mark.parametrize(
    ("writer_key", "reader_key"), [(None, b"key"), (b"key", None), (b"key", b"another")]
)
async def test_object_with_another_key_is_corrupt(tmp_path, writer_key, reader_key):
    async with opened(tmp_path, writer_key) as storage:
        await storage.persist([item_of(1, payload_of(1, 100))])
    async with opened(tmp_path, reader_key) as storage:
        assert await storage.fetch([item_of(1, bytearray(100))]) == [FetchOutcome.CORRUPT]


async def test_object_of_another_format_version_is_a_miss_that_is_counted_and_stays(
    tmp_path, key, monkeypatch, caplog
):
    async with opened(tmp_path, key) as storage:
        with monkeypatch.context() as later:
            later.setattr(envelope, "FORMAT_VERSION", 2)
            await storage.persist([item_of(1, payload_of(1, 100))])
        written = path_of(tmp_path, 1).read_bytes()
        assert decode_header(written).format_version == 2
        for count in (1, 2):
            assert await storage.fetch([item_of(1, bytearray(100))]) == [FetchOutcome.MISSING]
            assert storage.stats()["other_version_objects"] == count
        assert storage.stats()["corrupt_objects"] == 0
        assert path_of(tmp_path, 1).read_bytes() == written
        monkeypatch.setattr(envelope, "FORMAT_VERSION", 2)
        assert await storage.fetch([item_of(1, bytearray(100))]) == [FetchOutcome.OK]
    assert "has format version 2, this release reads 1: it is left alone" in caplog.text


async def test_corrupt_object_that_cannot_be_removed_stays_a_miss(tmp_path, monkeypatch):
    async with opened(tmp_path) as storage:
        await storage.persist([item_of(1, payload_of(1, 100))])
        flip = path_of(tmp_path, 1)
        _flip(flip, HEADER_BYTES)

        async def refuse(_backend, _names):
            raise BackendUnavailable("no")

        monkeypatch.setattr(FileBackend, "delete", refuse)
        for count in (1, 2):
            assert await storage.fetch([item_of(1, bytearray(100))]) == [FetchOutcome.CORRUPT]
            assert storage.stats()["corrupt_objects"] == count


async def test_log_names_what_is_wrong(tmp_path, caplog):
    async with opened(tmp_path) as storage:
        await storage.persist([item_of(n, payload_of(n, 100)) for n in (1, 2)])
        write_with_another_namespace(tmp_path)
        _flip(path_of(tmp_path, 2), HEADER_BYTES)
        await storage.fetch([item_of(1, bytearray(100_000)), item_of(2, bytearray(100))])
    assert "wrong namespace" in caplog.text
    assert "wrong checksum" in caplog.text


async def test_files_are_summed_by_the_threads_that_read_them(tmp_path, monkeypatch):
    parts, add = [], RunningChecksum.add

    def noting(self, part):
        parts.append((threading.current_thread().name.rpartition("-")[0], part.nbytes))
        add(self, part)

    async with opened(tmp_path) as storage:
        await storage.persist([item_of(1, payload_of(1, 5 << 20))])
        monkeypatch.setattr(RunningChecksum, "add", noting)
        before = storage.stats()["checksum_seconds"]
        assert await storage.fetch([item_of(1, bytearray(5 << 20))]) == [FetchOutcome.OK]
        assert storage.stats()["checksum_seconds"] > before
    # In pieces that a core's cache holds, and nothing is read a second time.
    assert parts == [("hicache-read", 1 << 20)] * 5


def _reading(monkeypatch, tell):
    """Let the file backend say of parts what ``tell`` makes of them."""
    read = FileBackend.read

    async def changed(self, reads):
        outcomes = await read(self, [replace(one, on_part=None) for one in reads])
        for one in reads:
            tell(one)
        return outcomes

    monkeypatch.setattr(FileBackend, "read", changed)


async def test_large_payloads_that_nobody_summed_are_summed_outside_the_loop(tmp_path, monkeypatch):
    seen, is_valid = {}, HeaderCodec.is_valid

    def noting(self, item, *others):
        seen[item.payload.nbytes] = threading.current_thread() is threading.main_thread()
        return is_valid(self, item, *others)

    monkeypatch.setattr(HeaderCodec, "is_valid", noting)
    _reading(monkeypatch, lambda one: None)
    async with opened(tmp_path) as storage:
        items = [item_of(n, payload_of(n, 1000 * n)) for n in (1, 900)]
        await storage.persist(items)
        found = await storage.fetch([item_of(n, bytearray(1000 * n)) for n in (1, 900)])
    assert found == [FetchOutcome.OK] * 2
    assert seen == {1000: True, 900_000: False}


@pytest.mark.parametrize(
    "parts", [(0, 0), (1, 0), (0,), (0, 1, 1), (1, 1)], ids=lambda parts: "".join(map(str, parts))
)
async def test_a_backend_that_tells_of_wrong_parts_costs_a_second_look_and_no_object(
    tmp_path, monkeypatch, parts
):
    def tell(one):
        half = one.payload.nbytes // 2
        for part in parts:
            one.on_part(one.payload[part * half : (part + 1) * half])

    _reading(monkeypatch, tell)
    async with opened(tmp_path) as storage:
        await storage.persist([item_of(1, payload_of(1, 100_000))])
        assert await storage.fetch([item_of(1, bytearray(100_000))]) == [FetchOutcome.OK]


async def test_what_is_damaged_is_found_on_the_way_and_at_the_second_look(tmp_path):
    async with opened(tmp_path) as storage:
        await storage.persist([item_of(1, payload_of(1, 5 << 20))])
        path = path_of(tmp_path, 1)
        _flip(path, path.stat().st_size - 1)
        assert await storage.fetch([item_of(1, bytearray(5 << 20))]) == [FetchOutcome.CORRUPT]
        assert not path.exists()


async def test_many_verified_fetches_at_once(tmp_path):
    async with opened(tmp_path) as storage:
        items = [item_of(n, payload_of(n, 70_000 + n)) for n in range(100)]
        await asyncio.gather(*(storage.persist(items[n::10]) for n in range(10)))
        fetched = [item_of(n, bytearray(70_000 + n)) for n in range(100)]
        outcomes = await asyncio.gather(*(storage.fetch(fetched[n::10]) for n in range(10)))
        assert {outcome for part in outcomes for outcome in part} == {FetchOutcome.OK}
        assert all(a.payload == b.payload for a, b in zip(items, fetched, strict=True))


@pytest.mark.parametrize(("path", "golden_key"), [(GOLDEN, None), (GOLDEN_KEYED, KEY)])
async def test_golden_object_of_format_1_is_readable(tmp_path, path, golden_key):
    target = path_of(tmp_path, 1)
    target.parent.mkdir()
    shutil.copy(path, target)
    async with opened(tmp_path, golden_key) as storage:
        buffer = bytearray(100)
        assert await storage.fetch([item_of(1, buffer)]) == [FetchOutcome.OK]
        assert buffer == payload_of(1, 100)


@pytest.mark.parametrize(("path", "golden_key"), [(GOLDEN, None), (GOLDEN_KEYED, KEY)])
def test_encoder_still_writes_the_golden_object(path, golden_key):
    item = item_of(1, payload_of(1, 100))
    assert HeaderCodec(golden_key).encode(item) + item.payload == path.read_bytes()


def test_header_lies_as_the_format_document_says():
    item = item_of(1, payload_of(1, 100))
    header = HeaderCodec().encode(item)
    assert len(header) == HEADER_BYTES
    assert header[:8] == b"HICACHE\0"
    assert struct.unpack("<4I", header[8:24]) == (1, 4096, CHECKSUM_XXH3_128, 0)
    assert header[24:56] == NAMESPACE.encode().ljust(32, b"\0")
    assert header[56:88] == item.page_hash
    assert struct.unpack("<4I", header[88:104]) == (8, 16, 3, 0)
    assert struct.unpack("<Q", header[104:112]) == (100,)
    assert header[112:4064] == bytes(3952)
    checksum = xxhash.xxh3_128_digest(header[:4064] + bytes(item.payload))
    assert header[4064:] == checksum + bytes(16)


def test_header_of_another_pool_than_the_first_holds_its_digits_as_a_number():
    first = item_of(1, payload_of(1, 100))
    shard = replace(first.shard, pool="89abcdef")
    header = HeaderCodec().encode(replace(first, shard=shard))
    assert struct.unpack("<4I", header[88:104]) == (8, 16, 3, 0x89ABCDEF)
    assert header[:100] == HeaderCodec().encode(first)[:100]
    assert header[104:4064] == HeaderCodec().encode(first)[104:4064]
    assert (decode_header(header).pool, decode_header(HeaderCodec().encode(first)).pool) == (
        "89abcdef",
        "",
    )


async def test_an_object_under_the_name_of_another_pool_is_corrupt_and_the_log_says_so(
    tmp_path, key, caplog
):
    first = item_of(1, payload_of(1, 100))
    items = [first, *(of_pool(first, pool) for pool in ("00000001", "89abcdef"))]
    async with opened(tmp_path, key) as storage:
        fetched = [replace(item, payload=memoryview(bytearray(100))) for item in items]
        await storage.persist(items)
        assert await storage.fetch(fetched) == [FetchOutcome.OK] * 3
        folder = tmp_path / first.name[:3]
        shutil.copy(folder / items[1].name, folder / items[0].name)
        shutil.copy(folder / items[1].name, folder / items[2].name)
        outcomes = await storage.fetch(fetched)
        assert outcomes == [FetchOutcome.CORRUPT, FetchOutcome.OK, FetchOutcome.CORRUPT]
        assert await storage.exists([item.name for item in items]) == [False, True, False]
    assert caplog.text.count("wrong pool") == 2


def test_keyed_checksum_lies_as_the_format_document_says():
    item = item_of(1, payload_of(1, 100))
    header = HeaderCodec(KEY).encode(item)
    assert struct.unpack("<I", header[16:20]) == (CHECKSUM_BLAKE2B_256_KEYED,)
    key = hashlib.blake2b(KEY, digest_size=32).digest()
    checksum = hashlib.blake2b(header[:4064] + item.payload, digest_size=32, key=key)
    assert header[4064:] == checksum.digest()


def test_decoded_header_says_what_was_encoded():
    item = item_of(1, payload_of(1, 100))
    found = decode_header(HeaderCodec().encode(item))
    assert (found.format_version, found.checksum_kind) == (1, CHECKSUM_XXH3_128)
    assert (found.namespace, found.page_hash) == (NAMESPACE, item.page_hash)
    assert (found.layer_start, found.layer_stop, found.head_group) == (8, 16, 3)
    assert (found.pool, found.payload_bytes) == ("", 100)


@pytest.mark.parametrize("raw", [b"", b"HICACHE\0", bytes(HEADER_BYTES)])
def test_bytes_that_do_not_begin_like_an_object_are_corrupt(raw):
    with pytest.raises(CorruptShard, match="not an object"):
        decode_header(raw)


@pytest.mark.parametrize("change", [{"namespace": "n" * 33}, {"page_hash": bytes(31)}])
def test_fields_that_do_not_fit_the_header_are_refused(change):
    with pytest.raises(ConfigError, match="at most 32 bytes"):
        HeaderCodec().encode(item_of(1, b"", **change))


def test_empty_integrity_key_is_refused():
    with pytest.raises(ConfigError, match="must not be empty"):
        HeaderCodec(b"")
