"""What a refused engine leaves behind in its process."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_in_process import PAGE, prompt_of, running

from vllm_hicache.errors import ConfigError

pytestmark = pytest.mark.e2e


def test_after_an_engine_was_refused_the_next_one_starts_and_restores(
    tiny_llama: Callable[..., Path],
) -> None:
    refused = running(tiny_llama(), extra={"page_size": 48})
    with pytest.raises(ConfigError, match="page_size 48 and vLLM's block size"), refused:
        raise AssertionError("it was not refused")
    with running(tiny_llama()) as engine:
        prompt = prompt_of("after a refusal", 2 * PAGE + 9)
        engine.ask([prompt])
        engine.settle()
        engine.reset_device()
        assert [answer.cached for answer in engine.ask([prompt])] == [2 * PAGE]
