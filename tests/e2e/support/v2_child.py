"""Child process: lives of engines with the V2 model runner, one after the other.

`python -P v2_child.py SPECIFICATION RESULT`: that of `watched_restore` for each life under
``lives``, with what they share beside it, and ``is_async`` for asynchronous scheduling.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def answer(specification: Mapping[str, Any]) -> list[dict[str, Any]]:
    accept_masks_of_integers()
    if specification["is_async"]:
        schedule_asynchronously()
    from watched_restore import run_life

    shared = {key: value for key, value in specification.items() if key != "lives"}
    lives: list[dict[str, Any]] = []
    for life in specification["lives"]:
        lives.append(run_life({**shared, **life}, lives[-1]["said"] if lives else ()))
    return lives


def accept_masks_of_integers() -> None:
    """Triton's interpreter makes an integer of a comparison of scalars that it then widens.

    vLLM's search for n-grams masks with such a one, and the interpreter refuses its own.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def of_bools(mask: Any) -> Any:
        return TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    InterpreterBuilder.create_masked_load = lambda builder, pointers, mask, *rest: load(
        builder, pointers, of_bools(mask), *rest
    )
    InterpreterBuilder.create_masked_store = lambda builder, pointers, value, mask, *rest: store(
        builder, pointers, value, of_bools(mask), *rest
    )


def schedule_asynchronously() -> None:
    """vLLM's CPU platform turns it off as of no use there; the V2 runner can do it."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def update_and_keep(platform: type[CpuPlatform], config: Any) -> None:
        update(platform, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(update_and_keep)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(answer(given)))
