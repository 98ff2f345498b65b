"""What ``hicache doctor`` asks of the storage: one object there and back, room, and records."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_hicache.config import StorageConfig
from vllm_hicache.doctor_report import DoctorReport
from vllm_hicache.errors import BackendError, ConfigError
from vllm_hicache.keys import shard_name
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.masking import mask_url
from vllm_hicache.namespace_records import decode_record, neighbours
from vllm_hicache.quantities import rounded_size
from vllm_hicache.storage import (
    FetchOutcome,
    KeepsRecords,
    ShardObject,
    StorageBackend,
    TellsRoom,
    WriteOutcome,
)

if TYPE_CHECKING:
    from vllm_hicache.storage_backends.envelope import CheckedStorage

PROBE_BYTES = 1 << 20
_NUM_QUESTIONS = 5
_SLOW_MS = 50.0
"""An existence query may take so long (``storage.exists_timeout_s``)."""


def check_storage(
    report: DoctorReport, storage: StorageConfig, own_record: bytes | None, num_bytes: int
) -> None:
    """Open the storage, move one object of ``num_bytes`` there and back, read the records."""
    asyncio.run(_check(report, storage, own_record, num_bytes))


async def _check(
    report: DoctorReport, storage: StorageConfig, own_record: bytes | None, num_bytes: int
) -> None:
    from vllm_hicache.storage_backends.envelope import CheckedStorage
    from vllm_hicache.storage_backends.registry import open_backend

    facts: dict[str, object] = {"url": mask_url(storage.url)}
    report.facts["storage"] = facts
    key = storage.integrity_key.encode() if storage.integrity_key else None
    try:
        backend = open_backend(storage.url, storage)
    except ConfigError as error:
        _refuse(report, error)
        return
    checked = CheckedStorage(backend, integrity_key=key)
    try:
        started = time.monotonic()
        await checked.open()
        facts["open_ms"] = _ms(started)
        report.add("storage", "ok", f"{facts['url']} opened in {facts['open_ms']} ms")
        await _probe(report, backend, checked, num_bytes, facts)
        await _describe_room(report, backend, facts)
        await _compare(report, backend, own_record)
    except ConfigError as error:
        _refuse(report, error)
    except BackendError as error:
        advice = "start or reach the service; an engine would start without storage and join later"
        report.add("storage", "failed", f"cannot be opened: {mask_url(str(error))}", advice)
    finally:
        await checked.close()


def _refuse(report: DoctorReport, error: ConfigError) -> None:
    report.add("storage", "refused", mask_url(str(error)), "correct storage.url or its options")


def _ms(started: float) -> float:
    return round((time.monotonic() - started) * 1000, 2)


async def _probe(
    report: DoctorReport,
    backend: StorageBackend,
    checked: "CheckedStorage",
    num_bytes: int,
    facts: dict[str, object],
) -> None:
    """Write, ask, read back, compare and delete one object that nobody else ever names."""
    payload = secrets.token_bytes(num_bytes)
    item = _probe_object(bytearray(payload))
    times: dict[str, float] = {}
    facts["probe_bytes"], facts["probe_ms"] = num_bytes, times
    problem = ""
    try:
        started = time.monotonic()
        outcome = (await checked.persist([item]))[0]
        times["write"] = _ms(started)
        if outcome is not WriteOutcome.STORED:
            advice = "make room (storage.capacity, free space, maxmemory) or allow writes"
            report.add("storage probe", "failed", "the store takes no writes now", advice)
            return
        problem = await _read_back(checked, item, payload, times)
        started = time.monotonic()
        num_deleted = await backend.delete([item.name])
        times["delete"] = _ms(started)
        if not problem and num_deleted != 1:
            problem = f"one object was written, {num_deleted} could be deleted"
    except BackendError as error:
        problem = mask_url(str(error))
    if problem:
        advice = "look at the log of the service and at the network between it and this host"
        report.add("storage probe", "failed", problem, advice)
        return
    listed = ", ".join(f"{name} {value} ms" for name, value in times.items())
    report.add("storage probe", "ok", f"{rounded_size(num_bytes)} verified and removed: {listed}")
    if times["exists"] > _SLOW_MS:
        report.add(
            "storage latency",
            "note",
            f"an existence query takes {times['exists']} ms, requests wait {_SLOW_MS:g} ms for one",
            "raise storage.exists_timeout_s, or use a store that is nearer",
        )


async def _read_back(
    checked: "CheckedStorage", item: ShardObject, payload: bytes, times: dict[str, float]
) -> str:
    """What is wrong with the object that was written; "" when nothing is."""
    questions = []
    for _ in range(_NUM_QUESTIONS):
        started = time.monotonic()
        if not (await checked.exists([item.name]))[0]:
            return "an object that was written is not there"
        questions.append(_ms(started))
    times["exists"] = sorted(questions)[_NUM_QUESTIONS // 2]
    item.payload[:] = bytes(len(payload))
    started = time.monotonic()
    outcome = (await checked.fetch([item]))[0]
    times["read"] = _ms(started)
    if outcome is not FetchOutcome.OK:
        return f"the object that was written reads as {outcome.value}"
    return "" if bytes(item.payload) == payload else "other bytes came back than were written"


def _probe_object(buffer: bytearray) -> ShardObject:
    namespace, page_hash = f"hc1-{secrets.token_hex(8)}", secrets.token_bytes(32)
    shard = Shard(LayerSpan(0, 1), 0, 0, len(buffer))
    name = shard_name(page_hash, namespace, shard)
    return ShardObject(name, namespace, page_hash, shard, memoryview(buffer))


async def _describe_room(
    report: DoctorReport, backend: StorageBackend, facts: dict[str, object]
) -> None:
    if not isinstance(backend, TellsRoom):
        return
    try:
        room = await backend.room()
    except BackendError as error:
        report.add("storage room", "note", f"unknown: {mask_url(str(error))}")
        return
    facts["room"] = room
    bound = {name: value for name, value in room.items() if value is not None}
    text = ", ".join(f"{name} {_of(name, value)}" for name, value in bound.items())
    limits = ("capacity_bytes", "kept_free_bytes", "maxmemory_bytes", "ttl_s")
    if any(name in bound for name in limits) or bound.get("expires_after_days", "never") != "never":
        report.add("storage room", "ok", text)
    else:
        advice = (
            "set storage.capacity (file), maxmemory or storage.ttl_s (Redis), a lifecycle rule (S3)"
        )
        report.add("storage room", "note", f"nothing bounds this store: {text}", advice)


def _of(name: str, value: str | int) -> str:
    is_size = isinstance(value, int) and name.endswith("_bytes")
    return rounded_size(int(value)) if is_size else str(value)


async def _compare(report: DoctorReport, backend: StorageBackend, own_record: bytes | None) -> None:
    """Which namespaces the store describes, and how they differ from this engine's."""
    if not isinstance(backend, KeepsRecords):
        report.add("namespaces", "note", f"the backend {backend.name} keeps no records of them")
        return
    try:
        records = await backend.read_records()
    except BackendError as error:
        report.add("namespaces", "note", f"cannot be read: {mask_url(str(error))}")
        return
    if own_record is None:
        found = {digest: decode_record(digest, record) for digest, record in records.items()}
        report.facts["stored_namespaces"] = [
            {"namespace": digest, **fields} for digest, fields in found.items() if fields
        ]
        report.add("namespaces", "ok", f"the store describes {len(records)}")
        return
    report.facts["stored_namespaces"] = _differences(records, own_record)
    is_known = own_record in records.values()
    state = "and this engine's is among them" if is_known else "this engine's is not among them"
    report.add(
        "namespaces", "ok" if is_known else "note", f"the store describes {len(records)}, {state}"
    )


def _differences(records: Mapping[str, bytes], own_record: bytes) -> list[dict[str, object]]:
    return [
        {
            "namespace": one.digest,
            "differs": {d.field: {"here": d.here, "there": d.there} for d in one.differences},
        }
        for one in neighbours(own_record, records)
    ]
