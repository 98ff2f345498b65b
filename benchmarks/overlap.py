"""A profile of one moment: copies in both directions beside the forward, by the device's clock.

    python benchmarks/overlap.py --shape llama-8b --out results/
    python benchmarks/overlap.py --shape llama-8b --load-mode layerwise --out results/

Needs a GPU. Some requests decode. Then a stored prompt, which the device has lost, and a fresh one
of the same length arrive together: the first is loaded, the second computed and saved. Told is how
long the device was busy with each kind of work, and how long copies ran while the forward did.
``overlap.json`` has the intervals, ``overlap.png`` draws them.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_hicache.benchmarks.arms import CONNECTORS
from vllm_hicache.benchmarks.engine_plan import EnginePlan
from vllm_hicache.benchmarks.model_shapes import SHAPES, kv_bytes_per_token, model_of
from vllm_hicache.benchmarks.run_record import describe, run_record, table, write_json

Interval = tuple[float, float]
"""Begin and end in ms."""
SPARE_TOKENS = 64
LANES = ("forward", "relayout", "copies to the device", "copies to host")
RELAYOUT = "move_units"
"""Name of the kernel in ``kernels/triton_units.py``."""
LEAST_COPY_BYTES = 1 << 16
"""vLLM's own copies, of tokens and block tables, are shorter."""


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="folder or name of a model; default: --shape tiny")
    add("--shape", choices=tuple(SHAPES), help="shape of a model, with weights without meaning")
    add("--dtype", default="auto")
    add("--tokens", type=int, default=32768, help="of the stored and of the fresh prompt")
    add("--decoding", type=int, default=16, help="requests that decode meanwhile")
    add("--answer-tokens", type=int, default=512, help="of each of them")
    add("--block-size", type=int, default=16, help="vLLM's tokens per block")
    add("--page-size", type=int, default=256, help="tokens of a page")
    add("--load-mode", choices=("async", "layerwise"), default="async")
    add("--out", type=Path, help="folder for overlap.json and overlap.png")
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace, folder: Path) -> EnginePlan:
    """One engine in this process; the device holds all that is asked at once."""
    model = model_of(options, folder)
    per_token = kv_bytes_per_token(model.config, options.dtype)
    small = options.decoding * (options.page_size + options.answer_tokens + options.page_size)
    engine = {
        "model": model.name,
        "dtype": options.dtype,
        "load_format": model.load_format,
        "skip_tokenizer_init": True,
        "max_model_len": options.tokens + SPARE_TOKENS,
        "max_num_seqs": options.decoding + 2,
        "block_size": options.block_size,
        "kv_cache_memory_bytes": (3 * options.tokens + small) * per_token,
        "disable_log_stats": False,
    }
    return EnginePlan(
        arm="hicache",
        engine=engine,
        connector=CONNECTORS["hicache"],
        connector_options={
            "host_memory": (4 * options.tokens + 2 * small) * per_token,
            "page_size": options.page_size,
            "load_mode": options.load_mode,
            "skip_slow_loads": False,
        },
        environment={},
        in_process=True,
        vocab_size=model.vocab_size,
        bytes_per_token=per_token,
    )


async def profile(options: argparse.Namespace, planned: EnginePlan) -> dict[str, list[Interval]]:
    """Lane -> when the device was busy with it, from the arrival of the two prompts on."""
    from vllm_hicache.benchmarks.engine_session import EngineSession

    session = EngineSession(planned)
    random = np.random.default_rng(0)

    def fresh(num_tokens: int) -> list[int]:
        return [int(token) for token in random.integers(0, planned.vocab_size, num_tokens)]

    try:
        stored = fresh(options.tokens)
        for _ in range(2):  # kernels of both directions are compiled the first time
            await session.answer(stored, 1)
            await session.drop_device()
        decoding = [
            asyncio.create_task(session.answer(fresh(options.page_size), options.answer_tokens))
            for _ in range(options.decoding)
        ]
        await asyncio.sleep(0.5)  # all decode by now
        return await _profiled(session, stored, fresh(options.tokens), decoding)
    finally:
        session.shutdown()


async def _profiled(
    session: Any, stored: list[int], other: list[int], decoding: list[asyncio.Task[Any]]
) -> dict[str, list[Interval]]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        loaded, computed = await asyncio.gather(session.answer(stored, 1), session.answer(other, 1))
        await asyncio.sleep(0.1)  # the last copies to host
    await asyncio.gather(*decoding)
    if not loaded.num_cached or computed.num_cached:
        raise SystemExit(f"{loaded.num_cached} and {computed.num_cached} tokens were cached")
    print(f"TTFT: {loaded.ttft_s * 1e3:.1f} ms loaded, {computed.ttft_s * 1e3:.1f} ms computed")
    return lanes_of(profiler.profiler.kineto_results.events())


def lanes_of(events: Iterable[Any]) -> dict[str, list[Interval]]:
    """Sort the device's events; times count from the first."""
    lanes: dict[str, list[Interval]] = defaultdict(list)
    for event in events:
        lane = _lane_of(event.name(), event.nbytes())
        if lane and "CUDA" in str(event.device_type()):
            begin = event.start_ns() / 1e6
            lanes[lane].append((begin, begin + event.duration_ns() / 1e6))
    first = min(begin for found in lanes.values() for begin, _ in found)
    return {
        lane: merged((begin - first, end - first) for begin, end in lanes[lane]) for lane in LANES
    }


def _lane_of(name: str, num_bytes: int) -> str:
    if name.startswith("Memset") or "Sync" in name:
        return ""
    if name.startswith("Memcpy"):
        if 0 < num_bytes < LEAST_COPY_BYTES:
            return ""
        return LANES[2] if "HtoD" in name else LANES[3] if "DtoH" in name else ""
    return "relayout" if RELAYOUT in name else "forward"


def merged(intervals: Iterable[Interval], gap_ms: float = 0.0) -> list[Interval]:
    """Sorted; those that meet, or are at most ``gap_ms`` apart, as one.

    >>> merged([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0)])
    [(0.0, 3.0), (4.0, 5.0)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + gap_ms:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def busy_ms(intervals: list[Interval]) -> float:
    """Of merged ones."""
    return sum(end - begin for begin, end in intervals)


def overlap_ms(a: list[Interval], b: list[Interval]) -> float:
    """How long both of two merged lists are busy.

    >>> overlap_ms([(0.0, 3.0)], [(1.0, 2.0), (2.5, 9.0)])
    1.5
    """
    return busy_ms(a) + busy_ms(b) - busy_ms(merged([*a, *b]))


def report(lanes: dict[str, list[Interval]]) -> str:
    """A row for each kind of work."""
    forward = lanes["forward"]
    rows = []
    for lane in LANES:
        busy = busy_ms(lanes[lane])
        beside = overlap_ms(lanes[lane], forward)
        share = f"{beside / busy:.0%}" if busy and lane != "forward" else ""
        rows.append([lane, f"{busy:,.1f}", f"{beside:,.1f}" if share else "", share])
    return table(["the device's work", "busy ms", "beside the forward ms", "share"], rows)


def plot(path: Path, lanes: dict[str, list[Interval]], title: str) -> None:
    """A lane for each kind of work, over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(13, 3.2), layout="constrained")
    for row, lane in enumerate(reversed(LANES)):
        bars = [(begin, end - begin) for begin, end in merged(lanes[lane], gap_ms=0.02)]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=f"C{row}")
    axes.set_yticks(range(len(LANES)), list(reversed(LANES)))
    axes.set_xlabel("ms since the first event on the device")
    figure.suptitle(title, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> int:
    options = parse_options()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with tempfile.TemporaryDirectory(prefix="hicache-overlap-") as name:
        lanes = asyncio.run(profile(options, plan(options, Path(name))))
    record = run_record()
    print(describe(record))
    print(report(lanes))
    if options.out is not None:
        write_json(options.out / "overlap.json", {**record, "lanes": lanes})
        plot(options.out / "overlap.png", lanes, describe(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
