"""The benchmark of copies measures every way, and knows from where on copy engines are enough."""

import pytest
import torch

CPU = torch.device("cpu")


def test_every_way_is_measured_in_both_directions():
    from vllm_hicache.benchmarks.copy_paths import Shape, lines_of, relayout_lines

    shape = Shape("tiny", "LBNHC", 2, 2, 32, 4, 8)
    lines = list(lines_of(shape, 2 * shape.layout.page_bytes, CPU, 1))
    ways = ("plain", "torch", "triton", "copy_engine")
    assert [(line.way, line.direction) for line in lines] == [
        (way, direction) for way in ways for direction in ("save", "load")
    ]
    assert all(line.ms > 0 and line.run_bytes == 32 for line in lines)
    assert {line.direction for line in relayout_lines(shape, CPU, 1)} == {"save", "load"}


@pytest.mark.parametrize(
    ("engine_rates", "found"),
    [
        ({4: 9.0, 8: 11.0, 16: 12.0}, 8),
        ({4: 11.0, 8: 9.0, 16: 12.0}, 16),
        ({4: 1.0, 8: 1.0, 16: 9.9}, None),
    ],
)
def test_the_crossover_is_where_copy_engines_are_never_slower_again(engine_rates, found):
    from vllm_hicache.benchmarks.copy_paths import Line, crossover

    lines = [
        Line("one head", run_bytes, 1, way, direction, 1.0, rate)
        for run_bytes, engine in engine_rates.items()
        for way, rate in (("triton", 10.0), ("copy_engine", engine))
        for direction in ("save", "load")
    ]
    assert crossover(lines) == found
