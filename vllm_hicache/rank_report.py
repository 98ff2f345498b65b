"""What a divergence reads like: the text for the log, and the JSON file with what led to it."""

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_hicache.rank_events import Event, Pairs
from vllm_hicache.rank_places import WorkerPlace
from vllm_hicache.rank_streams import Divergence

HEADLINE = "Found rank divergence"
SCHEDULER = "scheduler"


def participants(places: Sequence[WorkerPlace]) -> list[str]:
    """Names by number; the scheduler comes after the workers."""
    return [*(str(place) for place in places), SCHEDULER]


def divergence_text(found: Divergence, names: Sequence[str]) -> str:
    """Who differs where, then the event of each participant, in lines of their own."""
    odd = ", ".join(names[i] for i in found.odd)
    if found.is_tied:
        odd = f"no side has a majority among {odd}"
    lines = [f"{HEADLINE} ({found.kind}) at step {found.step} in {found.call}: {odd}"]
    if found.stream != found.call:
        lines.append(f"  stream: {found.stream}")
    for name, event in zip(names, found.events, strict=False):
        is_heard = event is not None or name is not SCHEDULER
        if is_heard:
            lines.append(f"  {name}: {event_text(event)}")
    return "\n".join(lines)


def event_text(event: Event | None) -> str:
    if event is None:
        return "no such call"
    text = f"step {event.step} {event.call}({_pairs_text((*event.key, *event.arguments))})"
    if event.result:
        text += f" -> {_pairs_text(event.result)}"
    if event.shown:
        text += f"; not compared: {_pairs_text(event.shown)}"
    return text


def _pairs_text(pairs: Pairs) -> str:
    return ", ".join(f"{label}={value}" for label, value in pairs)


def divergence_record(found: Divergence, names: Sequence[str]) -> dict[str, Any]:
    return {
        "class": found.kind,
        "step": found.step,
        "call": found.call,
        "stream": found.stream,
        "differing": [names[i] for i in found.odd],
        "events": {
            name: None if event is None else event_record(event)
            for name, event in zip(names, found.events, strict=False)
        },
    }


def event_record(event: Event) -> dict[str, Any]:
    return {
        "step": event.step,
        "stream": event.stream,
        "call": event.call,
        "key": dict(event.key),
        "arguments": dict(event.arguments),
        "result": dict(event.result or ()),
        "not_compared": dict(event.shown),
    }


def write_dump(
    folder: str | None, cause: dict[str, Any], histories: Iterable[tuple[str, Iterable[Event]]]
) -> Path:
    """Write the cause and the last events of everyone, oldest first, into a new private file.

    ``folder`` is made where it is missing; None is the system's folder for temporary files.
    Raises OSError where the file cannot be written.
    """
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    record = cause | {
        "last_events": {name: [event_record(e) for e in events] for name, events in histories}
    }
    descriptor, path = tempfile.mkstemp(prefix="hicache-ranks-", suffix=".json", dir=folder)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump(record, file, indent=1)
    return Path(path)
