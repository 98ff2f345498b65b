"""How fast a storage process fetches cached files into host slots, beside plain reads of them.

    python -P benchmarks/fetch_rate.py FOLDER [--page-mib 32] [--pages 64] [--rounds 5]
    python -P benchmarks/fetch_rate.py FOLDER --used-slots --drop-page-cache

A real storage process with its host pool, and this process in the place of its scheduler; no engine
and no GPU. Each round fetches all pages as one operation and right before reads the same files by
plain threads into memory that is mapped. Told are both rates, and their ratio, as medians over
rounds. Slots are fresh in each round: no fetch has filled them before; with --used-slots they are
the same ones each time. Pages are compared with what was stored after each fetch.
"""

import argparse
import mmap
import shutil
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from vllm_hicache.benchmarks.page_cache import drop_page_cache
from vllm_hicache.benchmarks.raw_rates import file_read_gb_per_s
from vllm_hicache.benchmarks.run_record import describe, run_record, table, write_json
from vllm_hicache.config import StorageConfig
from vllm_hicache.host_pool import HostPool
from vllm_hicache.layout import LayerSpan, Shard
from vllm_hicache.options import STORAGE_OPTIONS
from vllm_hicache.storage_channel import ChannelUp, StorageChannels
from vllm_hicache.storage_messages import (
    Command,
    Fetch,
    FetchReleased,
    FetchSettled,
    Persist,
    PersistReleased,
    pack_hashes,
    pack_slots,
)
from vllm_hicache.storage_process_config import Section, StorageProcessConfig
from vllm_hicache.storage_supervisor import StorageProcess

NAMESPACE = "hc1-0123456789abcdef"
ANSWER_S = 120.0
"""Longest wait for an answer."""
MAPPING_S = 1.0
"""For each GiB of the pool: longest wait until the process has mapped it. An engine takes longer to
start; where the kernel is older than 5.14, slots are mapped at first use."""

T = TypeVar("T")


class FetchRig:
    """A worker's pool and its storage process, and the scheduler that talks to it."""

    def __init__(
        self, folder: Path, page_bytes: int, num_pages: int, num_slots: int, concurrency: int
    ) -> None:
        self.hashes = [sha256(str(number).encode()).digest() for number in range(num_pages)]
        self._pool = HostPool(num_slots, [page_bytes])
        for piece in self._pool.pieces:
            if refusal := self._pool.make_ready(piece):
                raise SystemExit(f"the host pool: {refusal}")
        shards = (Shard(LayerSpan(0, 32), 0, 0, page_bytes),)
        self._process = StorageProcess(
            StorageProcessConfig(
                worker_id=0,
                num_slots=num_slots,
                sections=(Section(0, page_bytes, shards, shards),),
                storage=_storage(folder, 2 * num_pages * page_bytes, concurrency),
            ),
            self._pool.fd,
        )
        self._channels = StorageChannels([self._process.start()])
        self._seen: list[object] = []
        self._next_op = 0
        self._wait_for(ChannelUp)

    def store(self) -> None:
        """Fill the first slots and persist them as all pages."""
        num_pages = len(self.hashes)
        slots = self._pool.tensors[0][:num_pages]
        for number in range(num_pages):
            slots[number].numpy()[:] = number % 251 + 1
        op = self._operation()
        packed = pack_slots(list(range(num_pages)))
        self._send(Persist(op, NAMESPACE, pack_hashes(self.hashes), packed, ANSWER_S))
        self._wait_for(PersistReleased)

    def await_mapping(self) -> bool:
        """Wait until the storage process has all of the pool in its page table; False when it has
        not in time."""
        status = Path(f"/proc/{self._process.pid}/status")
        deadline = time.monotonic() + MAPPING_S * self._pool.num_bytes / (1 << 30)
        while time.monotonic() < deadline:
            (line,) = (line for line in status.read_text().splitlines() if "RssShmem" in line)
            if int(line.split()[1]) << 10 >= self._pool.num_bytes:
                return True
            time.sleep(0.05)
        return False

    def fetch_s(self, first_slot: int) -> float:
        """Seconds to fetch all pages into successive slots; SystemExit where not all came."""
        op = self._operation()
        slots = pack_slots([first_slot + number for number in range(len(self.hashes))])
        started = time.perf_counter()
        self._send(Fetch(op, NAMESPACE, pack_hashes(self.hashes), slots, ANSWER_S))
        settled = self._wait_for(FetchSettled)
        seconds = time.perf_counter() - started
        self._wait_for(FetchReleased)
        if settled.num_pages != len(self.hashes):
            raise SystemExit(f"the fetch ended with {settled}")
        return seconds

    def check(self, first_slot: int) -> None:
        """SystemExit where a fetched page is not what was stored."""
        slots = self._pool.tensors[0]
        for number in range(len(self.hashes)):
            if not bool((slots[first_slot + number] == number % 251 + 1).all()):
                raise SystemExit(f"page {number} has other bytes")

    def close(self) -> None:
        self._channels.close()
        self._process.stop()
        self._pool.close()

    def _operation(self) -> int:
        self._next_op += 1
        return self._next_op

    def _send(self, message: Command) -> None:
        if not self._channels.send(0, message):
            raise SystemExit("the storage process is gone")

    def _wait_for(self, kind: type[T]) -> T:
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            for number, event in enumerate(self._seen):
                if isinstance(event, kind):
                    del self._seen[number]
                    return event
            self._seen += [event for _, event in self._channels.poll()]
            time.sleep(0.0005)
        raise SystemExit(f"no {kind.__name__} in {ANSWER_S:.0f} s")


def _storage(folder: Path, num_bytes: int, concurrency: int) -> StorageConfig:
    defaults: dict[str, Any] = {option.field: option.default for option in STORAGE_OPTIONS}
    sizes = {"capacity_bytes": num_bytes + mmap.PAGESIZE, "min_free_bytes": 0}
    limits = {
        "operation_timeout_s": ANSWER_S,
        "write_backlog_bytes": num_bytes,
        "read_concurrency": concurrency,
    }
    return StorageConfig(**{**defaults, **sizes, **limits, "url": f"file://{folder.resolve()}"})


def measure(options: argparse.Namespace) -> tuple[list[tuple[float, float]], bool]:
    """GB/s of the plain reads and of the fetch, round by round, and whether the pool was mapped
    before; the first round warms up."""
    page_bytes, num_pages = options.page_mib << 20, options.pages
    num_rounds = options.rounds + 1
    num_slots = num_pages * (2 if options.used_slots else 1 + num_rounds)
    rig = FetchRig(options.folder, page_bytes, num_pages, num_slots, options.read_concurrency)
    rates = []
    try:
        rig.store()
        is_mapped = rig.await_mapping()
        for number in range(num_rounds):
            first_slot = num_pages * (1 if options.used_slots else 1 + number)
            raw = file_read_gb_per_s(options.folder, drops_page_cache=options.drop_page_cache)
            if options.drop_page_cache:
                drop_page_cache(options.folder)
            seconds = rig.fetch_s(first_slot)
            rig.check(first_slot)
            rates.append((raw or 0.0, num_pages * page_bytes / seconds / 1e9))
    finally:
        rig.close()
    return rates[1:], is_mapped


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="is made for this run and removed")
    add("--page-mib", type=int, default=32, help="bytes of a page, one object")
    add("--pages", type=int, default=64, help="of one fetch")
    add("--rounds", type=int, default=5, help="counted ones; one more warms up")
    add("--read-concurrency", type=int, default=16, help="option of the connector")
    add("--used-slots", action="store_true", help="fetch into the same slots each time")
    add("--drop-page-cache", action="store_true", help="read from the disk itself")
    add("--out", type=Path, help="folder for fetch_rate.json")
    options = parser.parse_args(arguments)
    for name in ("page_mib", "pages", "rounds", "read_concurrency"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if options.folder.exists():
        parser.error(f"{options.folder} exists; the folder is made for this run and removed")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse_options(arguments)
    options.folder.mkdir(parents=True)
    try:
        rates, is_mapped = measure(options)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    shown = {
        "plain reads": [raw for raw, _ in rates],
        "fetch": [fetched for _, fetched in rates],
    }
    record = run_record()
    print(describe(record))
    share = median(fetched / raw for raw, fetched in rates)
    rows = [
        (name, *(f"{pick(found):.2f}" for pick in (median, min, max)))
        for name, found in shown.items()
    ]
    print(table(("GB/s", "median", "min", "max"), rows))
    print(f"The fetch reaches {share:.1%} of the plain reads (median over rounds).")
    if not is_mapped:
        print("The storage process had not mapped the pool when the rounds began: faults count.")
    if options.out is not None:
        names = ("page_mib", "pages", "read_concurrency")
        sizes = {name: getattr(options, name) for name in names}
        kinds = {"used_slots": options.used_slots, "drop_page_cache": options.drop_page_cache}
        kinds["is_mapped_ahead"] = is_mapped
        found = {"gb_per_s": shown, "share": share}
        write_json(options.out / "fetch_rate.json", {**record, **sizes, **kinds, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
