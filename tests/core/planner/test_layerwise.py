"""Loads that belong to the step that reads them, whatever their size and whatever else runs."""

from dataclasses import replace

import pytest
from planner_rig import Rig

from vllm_hicache.planner import Match
from vllm_hicache.simulate import script
from vllm_hicache.simulate.faults import run_seeds
from vllm_hicache.worth import NEVER

TOKENS = list(range(100, 140))
PREFILL_STEPS = 8


def layerwise(**options: object) -> Rig:
    return Rig(loads_by_layer=True, **options)


def test_every_load_belongs_to_its_step_whatever_its_size_and_what_runs() -> None:
    rig = layerwise(shares_device_pages=False)
    rig.fill_host(TOKENS[:16])
    rig.plan(is_busy=True)
    rig.planner.costs.copied(1 << 20, 1.0)
    first, second = rig.request("a", TOKENS[:17]), rig.request("b", TOKENS[:17])
    assert rig.match(first) == Match(16, is_async=False)
    loads = [rig.begin_load(state) for state in (first, second)]
    assert [load.is_async for load in loads] == [False, False]
    plan = rig.plan()
    assert ([op.op_id for op in plan.sync_loads], plan.loads) == ([1, 2], ())


def test_a_load_of_the_next_step_does_not_wait_for_the_acknowledgement_of_the_last() -> None:
    rig = layerwise(shares_device_pages=False)
    rig.fill_host(TOKENS[:8])
    rig.begin_load(rig.request("a", TOKENS[:9]))
    rig.plan()
    later = rig.request("b", TOKENS[:9])
    assert rig.match(later) == Match(8, is_async=False)
    rig.begin_load(later)
    assert [op.op_id for op in rig.plan().sync_loads] == [2]
    rig.finish_loads()
    assert rig.total("served_tokens/host") == 16


def test_a_device_hit_on_blocks_of_a_load_of_the_same_step_is_not_deferred() -> None:
    rig = layerwise()
    rig.fill_host(TOKENS[:16])
    rig.begin_load(rig.request("a", TOKENS[:9]))
    assert rig.match(rig.request("b", TOKENS[:17]), num_local=8) == Match(8, is_async=False)


def test_a_load_is_in_doubt_until_it_is_acknowledged() -> None:
    rig = layerwise()
    rig.fill_host(TOKENS[:8])
    load = rig.begin_load(rig.request("a", TOKENS[:9]))
    rig.plan()
    assert rig.planner.loads.doubts(sorted(load.block_ids)) == (load,)
    rig.finish_loads()
    rig.plan()
    assert rig.planner.loads.doubts(sorted(load.block_ids)) == ()


def test_a_load_is_judged_by_its_copy_alone_and_has_a_crossover() -> None:
    """No wait in line, no step until it is acknowledged: it is never worse than its copy."""
    rig = layerwise(skip_slow_loads=True)
    rig.fill_host(TOKENS[:8])
    for _ in range(PREFILL_STEPS):
        rig.planner.costs.prefilled(1000, 1.0)
    rig.planner.costs.loaded(1 << 20, 10.0)  # of a time with asynchronous loads
    rig.planner.costs.copied(1 << 20, 0.003)
    assert rig.match(rig.request("a", TOKENS[:9])) == Match(8, is_async=False)
    rig.planner.costs.copied(1 << 20, 100.0)
    for _ in range(100):
        rig.planner.costs.copied(1 << 20, 100.0)
    assert rig.match(rig.request("b", TOKENS[:9])) == Match(0)
    assert rig.planner.worth.crossovers()[0] == NEVER


@pytest.mark.parametrize(
    "num_seeds", [40, pytest.param(200, marks=pytest.mark.full)], ids=["few", "many"]
)
def test_no_rule_is_broken_in_stories_whose_loads_are_all_layerwise(
    num_seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = script._draw_options

    def draw_layerwise(*arguments, **named):
        return replace(draw(*arguments, **named), loads_by_layer=True)

    monkeypatch.setattr(script, "_draw_options", draw_layerwise)
    result = run_seeds(range(num_seeds), 100)
    assert [failure.what for failure in result.failures] == []
    assert result.counts["synchronous loads"] > num_seeds
    assert result.counts["asynchronous loads"] == 0
