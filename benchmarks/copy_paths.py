"""Rates of every way of copying KV between blocks and host slots, beside a plain pinned copy.

    python -P benchmarks/copy_paths.py --json results/copy_paths.json

Three tables: shapes of models by tokens; one head by the bytes that lie side by side in blocks and
pages, which tells from where on the copy engines alone are as fast as staging
(``COPY_ENGINE_RUN_BYTES`` of ``kernels/dispatch.py``); relayouts alone by the number of CTAs
(``RELAYOUT_CTAS``). Rates are GB/s (10^9) of KV, medians, from the call to the end on the device.
Blocks and slots are drawn at random. Host memory is pinned as the connector pins it.

Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import mmap
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path as FilePath
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_hicache.benchmarks.run_record import describe, run_record, table, write_json
from vllm_hicache.device_layout import DeviceGroup, RowFormat, TensorPlacement, device_layers
from vllm_hicache.kernels.dispatch import Path
from vllm_hicache.kernels.part_grid import part_grids
from vllm_hicache.kernels.reference import PageCopier, PoolsCopier
from vllm_hicache.layout import LayerSpan, PageLayout, registration_slots
from vllm_hicache.tiers import Direction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm_hicache.device_layout import DeviceLayers

CTAS = (4, 8, 16, 32, 64, 132)
TOKENS = (8_192, 32_768, 65_536)
MAX_COPIES = 1 << 18  # of a measured call; more take seconds each and are no choice anyway


@dataclass(frozen=True)
class Shape:
    """One worker's KV; rows in bytes of one token of one head."""

    name: str
    layout_name: str
    num_layers: int
    num_heads: int
    row_bytes: int
    block_size: int
    page_size: int

    @property
    def layout(self) -> PageLayout:
        heads = (0, self.num_heads, self.num_heads, 1)
        layers = LayerSpan(0, self.num_layers)
        return PageLayout(self.page_size, layers, self.num_layers, *heads, self.row_bytes, 0)

    def layers(self, num_blocks: int) -> DeviceLayers:
        """Where vLLM places the rows, without gaps; the layout's axes say the strides."""
        head = self.block_size * self.row_bytes
        layer = self.num_heads * head
        strides = {
            "LB": (num_blocks * layer, layer),
            "BL": (layer, self.num_layers * layer),
            "BH": (head, self.num_layers * layer),
        }
        placement = TensorPlacement(
            tuple(range(self.num_layers)), num_blocks, *strides[self.layout_name[:2]]
        )
        rows = RowFormat(self.num_heads, self.row_bytes, 0, 1)
        return device_layers(
            placement, rows, layout_name=self.layout_name, block_size=self.block_size
        )


LLAMA = Shape("Llama-8B", "LBNHC", 32, 8, 512, 16, 256)
MODELS = (
    LLAMA,
    replace(LLAMA, name="Llama-8B, heads outside", layout_name="LBHNC"),
    Shape("latents, 27 layers", "LBNHC", 27, 1, 1152, 64, 64),
    Shape("latents, layers inside", "BLNHC", 27, 1, 1152, 64, 64),
)
ONE_HEAD = Shape("one head", "LBNHC", 32, 1, 512, 16, 256)
BY_RUN = (
    *(replace(ONE_HEAD, block_size=tokens) for tokens in (8, 16, 32, 64, 128, 256)),
    *(
        replace(ONE_HEAD, layout_name="BLNHC", num_layers=layers, block_size=256)
        for layers in (2, 4, 8, 16, 32)
    ),
)


class Bench:
    """A KV buffer, pinned host slots, and copies of all their pages in random places."""

    def __init__(self, shape: Shape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        rng = np.random.default_rng(0)
        layout = shape.layout
        per_page = shape.page_size // shape.block_size
        num_blocks = num_pages * per_page + 1
        self.num_bytes = num_pages * layout.page_bytes
        self.raw = torch.ones(
            num_blocks * (layout.page_bytes // per_page), dtype=torch.uint8, device=device
        )
        self.group = DeviceGroup(0, shape.block_size, (shape.layers(num_blocks),))
        memory = mmap.mmap(-1, num_pages * layout.slot_stride)
        self.host = torch.frombuffer(memory, dtype=torch.uint8).view(num_pages, -1)
        self.host.fill_(1)
        self._pinned = pinned_pieces(self.host) if device.type == "cuda" else []
        units = np.arange(num_pages * per_page)
        slots = rng.permutation(num_pages)[units // per_page]
        blocks = 1 + rng.permutation(len(units))
        columns = (slots, units % per_page, blocks, np.zeros_like(units))
        self.copies = np.stack(columns, axis=1).astype(np.int32)

    def copier(self, path: Path) -> PoolsCopier:
        return PoolsCopier([PageCopier(self.raw, [self.group], self.shape.layout, path=path)])

    def plain(self, direction: Direction) -> None:
        """One contiguous pinned copy after the other, of the same bytes and the same size."""
        num_bytes = self.shape.layout.page_bytes
        on_device = self.raw[: len(self.host) * num_bytes].view(-1, num_bytes)
        for page, staged in zip(self.host[:, :num_bytes], on_device, strict=True):
            target, source = (page, staged) if direction is Direction.SAVE else (staged, page)
            target.copy_(source, non_blocking=True)

    def close(self) -> None:
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)


def pinned_pieces(host: torch.Tensor) -> list[int]:
    """Pin slots as the connector does, piece by piece; the addresses of the pieces."""
    addresses = []
    for piece in host.split(registration_slots(host.shape[1])):
        result = torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0)
        if int(result) != 0:
            raise SystemExit(f"{piece.numel()} bytes could not be pinned ({result})")
        addresses.append(piece.data_ptr())
    return addresses


@dataclass(frozen=True)
class Line:
    """A measured way."""

    shape: str
    run_bytes: int
    num_bytes: int
    way: str
    direction: str
    ms: float
    gb_per_s: float


def timed(call: Callable[[], None], device: torch.device, repeat: int, times: int = 1) -> float:
    """Median seconds of a call until the device is done, ``times`` at once; the first is not
    counted."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    seconds = []
    for _ in range(repeat + 1):
        synchronize(device)
        started = time.perf_counter()
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(times):
                call()
        synchronize(device)
        seconds.append((time.perf_counter() - started) / times)
    return median(seconds[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lines_of(shape: Shape, num_bytes: int, device: torch.device, repeat: int) -> Iterator[Line]:
    """All ways in both directions, but copy engines where they had too many copies to make."""
    num_pages = max(1, num_bytes // shape.layout.page_bytes)
    bench = Bench(shape, num_pages, device)
    group = PageCopier(bench.raw, [bench.group], shape.layout, path=Path.TORCH).groups[0]
    run_bytes = group.runs.run_bytes
    for path in (None, *Path):
        if path is Path.COPY_ENGINE and bench.num_bytes > MAX_COPIES * run_bytes:
            continue
        copier = None if path is None else bench.copier(path)
        for direction in Direction:
            if copier is None:
                call = partial(bench.plain, direction)
            else:
                copy = copier.save if direction is Direction.SAVE else copier.load
                call = partial(copy, (bench.copies,), (bench.host,))
            seconds = timed(call, device, repeat)
            rate = bench.num_bytes / seconds / 1e9
            name = "plain" if path is None else str(path)
            way = (shape.name, run_bytes, bench.num_bytes, name, str(direction))
            yield Line(*way, round(seconds * 1e3, 3), round(rate, 2))
        del copier
    bench.close()


def relayout_lines(shape: Shape, device: torch.device, repeat: int) -> Iterator[Line]:
    """Relayouts of 32 MiB alone, by the number of CTAs."""
    from vllm_hicache.kernels.triton_units import INTERPRETED, TritonUnits, device_sizes

    bench = Bench(shape, max(1, (32 << 20) // shape.layout.page_bytes), device)
    (grid,) = part_grids(bench.group, shape.layout, shape.block_size)
    rows = torch.from_numpy(bench.copies.astype(np.int64)).to(device)
    pages = torch.zeros(bench.host.shape, dtype=torch.uint8, device=device)
    for num_ctas in CTAS:
        is_cpu = device.type == "cpu"
        sizes = INTERPRETED if is_cpu else device_sizes(device, num_ctas)
        units = TritonUnits(bench.raw, grid, sizes)
        times = 1 if is_cpu else 16
        for direction in Direction:
            call = partial(units.move, direction, rows, pages, pages)
            seconds = timed(call, device, repeat, times)
            rate = bench.num_bytes / seconds / 1e9
            way = (shape.name, 0, bench.num_bytes, f"{num_ctas} CTAs", str(direction))
            yield Line(*way, round(seconds * 1e3, 3), round(rate, 1))
        if is_cpu:
            break
    bench.close()


def crossover(lines: list[Line]) -> int | None:
    """Smallest run from which on the copy engines are no slower than staging, both ways."""
    rates = {(line.run_bytes, line.way, line.direction): line.gb_per_s for line in lines}
    found = None
    for run_bytes in sorted({line.run_bytes for line in lines}, reverse=True):
        pairs = [
            (rates.get((run_bytes, "copy_engine", way), 0.0), rates[run_bytes, "triton", way])
            for way in map(str, Direction)
        ]
        if any(engine < staged for engine, staged in pairs):
            break
        found = run_bytes
    return found


def show(title: str, lines: Sequence[Line], head: Callable[[Line], tuple[str, ...]]) -> None:
    """A row for each shape and size, a column for each way and direction."""
    ways = list(dict.fromkeys((line.way, line.direction) for line in lines))
    rows: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for line in lines:
        rows.setdefault(head(line), {})[line.way, line.direction] = f"{line.gb_per_s:.1f}"
    header = [title, *(f"{way} {direction}" for way, direction in ways)]
    cells = [[" ".join(key), *(row.get(way, "") for way in ways)] for key, row in rows.items()]
    print(table(header, cells), end="\n\n")


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="of each run length")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of each model")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=FilePath)
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    device = torch.device("cuda", 0)
    record = run_record()
    print(describe(record), end="\n\n")
    models = [
        line
        for shape in MODELS
        for tokens in options.tokens
        for line in lines_of(
            shape, tokens // shape.page_size * shape.layout.page_bytes, device, options.repeat
        )
    ]
    show("GB/s", models, lambda line: (line.shape, f"{line.num_bytes / 1e9:.2f} GB"))
    by_run = [
        line
        for shape in BY_RUN
        for line in lines_of(shape, options.mib << 20, device, options.repeat)
    ]
    show("GB/s by KiB side by side", by_run, lambda line: (str(line.run_bytes >> 10),))
    at = crossover(by_run)
    print(f"copy engines are no slower than staging from {at} bytes side by side on\n")
    relayouts = [line for shape in MODELS for line in relayout_lines(shape, device, options.repeat)]
    show("GB/s of relayouts alone", relayouts, lambda line: (line.shape,))
    if options.json:
        record["crossover_bytes"] = at
        for name, lines in (("models", models), ("by_run", by_run), ("relayouts", relayouts)):
            record[name] = [asdict(line) for line in lines]
        write_json(options.json, record)


if __name__ == "__main__":
    main(parse_options())
