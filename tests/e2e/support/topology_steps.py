"""Child process, and the same steps in this one: engines that write prompts and read others'.

A specification has ``model``, ``storage`` (options of the connector's table), ``extra``,
``options`` (vLLM's), ``lengths``, ``name`` of this engine, whether it ``writes``, and the names of
those it ``reads``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_in_process import Engine, difference, prompt_of, running
from restore_child import as_list, published, wait_for_reads, wait_for_writes


def answer(specification: Mapping[str, Any]) -> dict[str, Any]:
    """One engine: what it answered cold, and what it restored of each writer."""
    with running(
        Path(specification["model"]),
        specification["storage"],
        extra=specification["extra"],
        **specification["options"],
    ) as engine:
        reads = [name for name in specification["reads"] if name != specification["name"]]
        record: dict[str, Any] = {name: read(engine, name, specification) for name in reads}
        if specification["writes"]:
            record["cold"] = ask(engine, specification["name"], specification)
            engine.settle()
            wait_for_writes(engine)
            record["persisted"] = difference(engine.counters(), {})
        if len(reads) < len(specification["reads"]):
            engine.reset_all()  # its own: host and device forget, storage does not
            own = specification["name"]
            record[own] = read(engine, own, specification)
        record["problems"] = engine.problems()
        record["page_bytes"] = engine.page_bytes
        return record


def ask(engine: Engine, writer: str, specification: Mapping[str, Any]) -> list[Any]:
    prompts = [prompt_of(f"{writer} {n}", n) for n in specification["lengths"]]
    return [as_list(answer) for answer in engine.ask_each(prompts)]


def read(engine: Engine, writer: str, specification: Mapping[str, Any]) -> dict[str, Any]:
    """Answers with pages of storage, what they cost, and the same from the device."""
    before, seen = engine.counters(), published(engine)
    restored = ask(engine, writer, specification)
    engine.settle()
    wait_for_reads(engine)
    counters = difference(engine.counters(), before)
    shown = difference(published(engine), seen)
    return {
        "restored": restored,
        "counters": counters,
        "published": shown,
        "device": ask(engine, writer, specification),
    }
