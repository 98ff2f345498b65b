"""What stops an engine with `load_mode: layerwise`."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from engine_in_process import Engine, prompt_of, running
from span_spy import spying_spans

from vllm_hicache.connectors.hicache import HiCacheConnector
from vllm_hicache.errors import InvariantBroken, LayerLoadFailed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_LAYERS = 4
LAYERWISE = {"load_mode": "layerwise"}


def ask_and_forget(engine: Engine, prompt: list[int]) -> None:
    """Host has it, the device has not."""
    engine.ask([prompt])
    engine.settle()
    engine.reset_device()


def test_a_failed_span_stops_the_engine_and_names_load_and_layer(
    tiny_llama: Callable[..., Path],
) -> None:
    prompt = prompt_of("to fail", 300)
    with spying_spans() as spy, running(tiny_llama(), extra=LAYERWISE) as engine:
        ask_and_forget(engine, prompt)
        spy.fails_at = 2
        message = r"worker 0: layer model\.layers\.2\.\S+ needs load 1: it failed: .*told to fail"
        with pytest.raises(LayerLoadFailed, match=message):
            engine.ask([prompt])
        assert spy.events == ["span 0", "span 1"]


def test_a_forward_that_does_not_ask_for_its_layers_stops_the_engine(
    tiny_llama: Callable[..., Path],
) -> None:
    prompt = prompt_of("unasked", 300)
    with running(tiny_llama(), extra=LAYERWISE) as engine:
        ask_and_forget(engine, prompt)
        message = f"did not wait for load 1 in {NUM_LAYERS} of {NUM_LAYERS} layers"
        with (
            patch.object(HiCacheConnector, "wait_for_layer_load", lambda *_: None),
            pytest.raises(InvariantBroken, match=message),
        ):
            engine.ask([prompt])
