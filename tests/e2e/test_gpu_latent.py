"""On one GPU: latent attention is restored from host memory and from files as it was computed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_in_process import PAGE, assert_same, difference, prompt_of, running
from tiny_latent import LATENT, NUM_LAYERS, ROPE, write_latent

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]

NUM_TOKENS, HIT = 350, 320
PAGE_BYTES = PAGE * NUM_LAYERS * (LATENT + ROPE) * 2  # bfloat16
COLD_TOLERANCE = 0.1
"""bfloat16: a cold prompt is computed in other chunks."""


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "graphs"])
def test_latents_come_back_from_host_and_files(
    tiny_llama: Callable[..., Path], tmp_path: Path, is_eager: bool
) -> None:
    llama = tiny_llama()
    model = write_latent(llama.parent / "latent", llama)
    prompt = prompt_of("latent", NUM_TOKENS)
    options = {"dtype": "bfloat16", "enforce_eager": is_eager, "block_size": PAGE}
    extra = {"fixed_weights": True}
    with running(model, tmp_path / "store", extra=extra, **options) as engine:
        assert engine.page_bytes == PAGE_BYTES
        cold = engine.ask([prompt])
        engine.settle()
        hit = engine.ask([prompt])
        engine.reset_device()
        before = engine.counters()
        host = engine.ask([prompt])
        engine.settle()
        engine.reset_all()
        file = engine.ask([prompt])
        engine.settle()
        counted = difference(engine.counters(), before)
        engine.assert_idle_and_clean()
    assert [a.cached for a in (*cold, *hit, *host, *file)] == [0, HIT, HIT, HIT]
    assert counted["served_tokens/host"] == counted["served_tokens/storage"] == HIT
    assert counted["fetched_bytes"] == HIT // PAGE * PAGE_BYTES
    assert_same(hit, cold, COLD_TOLERANCE)
    assert_same(host, hit)
    assert_same(file, hit)
