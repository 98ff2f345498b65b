"""Stored objects that were damaged between two engines: misses, removed, counted, never wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_in_process import PAGE, Answer, Engine, assert_same, prompt_of, running

from vllm_hicache.hashing import PageHashChain, chain_root
from vllm_hicache.keys import parse_shard_name
from vllm_hicache.layout import Shard
from vllm_hicache.storage import HEADER_BYTES, ShardObject
from vllm_hicache.storage_backends.envelope import HeaderCodec

pytestmark = pytest.mark.e2e
COLD_TOLERANCE = 1e-4
NUM_PAGES = 3
BAD_PAGE = 1
"""The page that is damaged: the one before it is still good, the one behind it out of reach."""


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def extend(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[HEADER_BYTES + 1234] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def of_another_namespace(file: Path) -> None:
    """A sound object, checksum and all, of other weights."""
    name, payload = parse_shard_name(file.name), file.read_bytes()[HEADER_BYTES:]
    other = ShardObject(
        file.name,
        "hc1-0123456789abcdef",
        name.page_hash,
        Shard(name.layers, name.head_group, 0, len(payload)),
        memoryview(payload),
    )
    file.write_bytes(HeaderCodec().encode(other) + payload)


ALONE = {
    "truncated": truncate,
    "extended": extend,
    "flipped": flip,
    "empty": empty,
    "of another namespace": of_another_namespace,
}
KINDS = (*ALONE, "swapped", "swapped with it")


@dataclass(frozen=True, slots=True)
class Record:
    """What an engine said before the damage, after it, and once its damage was repaired."""

    before: dict[str, Answer]
    after: dict[str, Answer]
    repaired: dict[str, Answer]
    files: dict[str, Path]
    damaged: dict[str, bytes]
    counters: dict[str, float]
    problems: list[str]


def prompt(kind: str) -> list[int]:
    return prompt_of(f"object {kind}", NUM_PAGES * PAGE + 5)


def ask_all(engine: Engine) -> dict[str, Answer]:
    answers = {kind: engine.ask([prompt(kind)])[0] for kind in KINDS}
    engine.settle()
    return answers


def bad_file(store: Path, kind: str) -> Path:
    """The first shard of the page of a prompt that is damaged."""
    chain = PageHashChain(PAGE, chain_root())
    chain.extend(prompt(kind), NUM_PAGES * PAGE)
    return min(store.rglob(f"{chain.hashes[BAD_PAGE].hex()}_*"))


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


@pytest.fixture(scope="module")
def record(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Record:
    store = tmp_path_factory.mktemp("corrupt") / "store"
    with running(tiny_llama(), store) as engine:
        before = ask_all(engine)
    files = {kind: bad_file(store, kind) for kind in KINDS}
    for kind, damage in ALONE.items():
        damage(files[kind])
    swap(files["swapped"], files["swapped with it"])
    damaged = {kind: file.read_bytes() for kind, file in files.items()}
    with running(tiny_llama(), store, extra={"fixed_weights": True}) as engine:
        after = ask_all(engine)
        engine.wait_for("corrupt_objects", len(KINDS))
        counters = engine.counters()
        problems = engine.problems()
        engine.reset_all()
        repaired = ask_all(engine)
    return Record(before, after, repaired, files, damaged, counters, problems)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_object_is_a_miss_and_the_answer_is_right(record: Record, kind: str) -> None:
    assert record.after[kind].cached == BAD_PAGE * PAGE
    assert_same([record.after[kind]], [record.before[kind]], COLD_TOLERANCE)


def test_every_damaged_object_is_counted_and_removed_once(record: Record) -> None:
    assert record.counters["corrupt_objects"] == len(KINDS)
    assert record.counters["objects_deleted"] == len(KINDS)
    assert record.counters["fetch_ended/corrupt"] == len(KINDS)
    assert record.counters["served_tokens/storage"] == len(KINDS) * BAD_PAGE * PAGE
    assert record.problems == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_object_is_replaced_by_a_sound_one(record: Record, kind: str) -> None:
    assert record.files[kind].read_bytes() != record.damaged[kind]
    assert record.repaired[kind].cached == NUM_PAGES * PAGE
    assert_same([record.repaired[kind]], [record.before[kind]], COLD_TOLERANCE)
