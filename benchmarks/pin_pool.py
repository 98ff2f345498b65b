"""How fast a host pool gets ready: backed, and pinned where there is a GPU.

    python benchmarks/pin_pool.py
    python benchmarks/pin_pool.py --gib 2 8 32 --threads 1 4 8 --out results/

Each row is a process of its own, which makes a pool as a worker does. Told are the time until the
first slots can be used (that is what a start waits for), the time until all can, the rate of it,
the longest of many small operations of torch that the main thread ran meanwhile (on a GPU with the
wait for it: driver and kernel have locks), what the process then has in memory for each byte that
was asked for, and the time to let go.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_hicache.benchmarks.run_record import describe, run_record, table, write_json

SLOT_BYTES = 32 << 20
"""A page of 256 tokens of Llama-3.1-8B in bf16."""
COLUMNS = {
    "GiB": "gib",
    "threads": "threads",
    "first s": "first_s",
    "all s": "all_s",
    "GiB/s": "gib_per_s",
    "longest ms": "longest_ms",
    "resident / asked": "resident_ratio",
    "close s": "close_s",
}


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gib", type=float, nargs="+", default=[2, 8, 32], help="sizes of the pool")
    add("--threads", type=int, nargs="+", default=[8], help="at most; half of the cores is one too")
    add("--out", type=Path, help="folder for pin_pool.json")
    add("--row", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(gib: float, num_threads: int) -> dict[str, float]:
    """One pool, from nothing to nothing."""
    import torch

    from vllm_hicache.host_pool import HostPool
    from vllm_hicache.pool_growth import PoolGrowth

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)  # a worker has its context long before
    before = resident_bytes()
    started = time.perf_counter()
    pool = HostPool(int(gib * 2**30) // SLOT_BYTES, [SLOT_BYTES], device=device)
    growth = PoolGrowth(pool, lambda *_: None, name="benchmark", max_threads=num_threads)
    growth.begin()
    first_s = time.perf_counter() - started
    growth.go_on()
    longest_s = work_until(lambda: growth.join(0), device)
    if growth.refusal:
        raise SystemExit(f"{gib} GiB are not ready: {growth.refusal}")
    all_s = time.perf_counter() - started
    grown = resident_bytes() - before
    closing = time.perf_counter()
    pool.unpin()  # an engine that ends leaves it to a thread
    pool.close()
    return {
        "gib": gib,
        "threads": num_threads,
        "pinned": pool.is_pinned,
        "numa_node": -1 if pool.numa_node is None else pool.numa_node,
        "first_s": first_s,
        "all_s": all_s,
        "gib_per_s": gib / all_s,
        "longest_ms": longest_s * 1000,
        "resident_ratio": grown / pool.num_bytes,
        "close_s": time.perf_counter() - closing,
    }


def work_until(is_done: Callable[[], bool], device: Any) -> float:
    """Run small operations; the longest took so many seconds."""
    import torch

    numbers, longest = torch.zeros(1024, device=device), 0.0
    while not is_done():
        started = time.perf_counter()
        numbers += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        longest = max(longest, time.perf_counter() - started)
    return longest


def resident_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))


def measure_apart(gib: float, num_threads: int) -> dict[str, float]:
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--row"]
    command += ["--gib", str(gib), "--threads", str(num_threads)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return row


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    if options.row:
        print(json.dumps(measure(options.gib[0], options.threads[0])))
        return
    import torch  # noqa: F401  (the record names the GPU where torch is loaded)

    rows = [measure_apart(gib, threads) for gib in options.gib for threads in options.threads]
    record = {**run_record(), "rows": rows}
    print(describe(record))
    print(table(tuple(COLUMNS), [[f"{row[COLUMNS[c]]:.4g}" for c in COLUMNS] for row in rows]))
    print(f"pinned: {rows[0]['pinned']}, NUMA node: {rows[0]['numa_node']}")
    if options.out:
        write_json(options.out / "pin_pool.json", record)


if __name__ == "__main__":
    main()
