"""A store that two format versions share: each misses what the other wrote, and leaves it there.

The other version is this release with its one constant raised, in the engine and in its storage
process, so that all it writes goes the real way.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_in_process import PAGE, Answer, assert_same, prompt_of, running

from vllm_hicache import near_miss_notice
from vllm_hicache.connectors import vllm_view
from vllm_hicache.keys import FORMAT_VERSION, parse_shard_name
from vllm_hicache.storage_backends import file_names
from vllm_hicache.storage_backends.envelope import decode_header

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.vllm]
COLD_TOLERANCE = 1e-4
NEXT = FORMAT_VERSION + 1
PAGES = 20
"""Storage says what it holds instead once 16 pages were asked for in vain."""
PROMPT = prompt_of("format version", PAGES * PAGE + 9)
HIT = PAGES * PAGE
SHARDS_PER_PAGE = 2
# Runs in every Python process that starts meanwhile: storage processes are such.
RAISED = f"""
import vllm_hicache.keys
vllm_hicache.keys.FORMAT_VERSION = {NEXT}
"""


@contextmanager
def raised_version(folder: Path) -> Iterator[None]:
    """Engines that start now write and read format ``NEXT``."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(RAISED)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setattr(vllm_view, "FORMAT_VERSION", NEXT)
        yield


@dataclass(frozen=True, slots=True)
class Life:
    """One engine's answer and counters, and what the store held after it."""

    answer: Answer
    counters: dict[str, float]
    files: dict[str, bytes]


def live(model: Path, store: Path, reason: str = "") -> Life:
    """``reason`` is a counter that is waited for: storage processes tell once a second."""
    with running(model, store) as engine:
        answer = engine.ask([PROMPT])[0]
        engine.assert_idle_and_clean()
        if reason:
            engine.wait_for(reason, 1)
        counters = engine.counters()
    objects = [path for path in store.rglob("*") if file_names.is_object(path.name)]
    return Life(answer, counters, {path.name: path.read_bytes() for path in objects})


def _assert_hit(life: Life, num_tokens: int) -> None:
    assert life.answer.cached == num_tokens
    assert life.counters["served_tokens/storage"] == num_tokens
    for untouched in ("corrupt_objects", "objects_deleted", "objects_evicted"):
        assert life.counters[untouched] == 0, untouched


def test_each_version_reads_its_own_objects_and_leaves_the_others_alone(
    tiny_llama: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, store = tiny_llama(), tmp_path / "store"
    this = live(model, store)
    with raised_version(tmp_path / "raised"):
        logging.getLogger(near_miss_notice.__name__).addHandler(caplog.handler)
        other = live(model, store, reason="near_misses")
        logging.getLogger(near_miss_notice.__name__).removeHandler(caplog.handler)
        other_again = live(model, store)
    this_again = live(model, store)
    for life, num_tokens in ((this, 0), (other, 0), (other_again, HIT), (this_again, HIT)):
        _assert_hit(life, num_tokens)
        assert life.counters["other_version_objects"] == 0
        assert_same([life.answer], [this.answer], COLD_TOLERANCE)
        assert life.counters["near_misses"] == (life is other)
    assert f"uses format_version={NEXT}, the store holds" in caplog.text
    assert f"with format_version={FORMAT_VERSION} (namespace hc1-" in caplog.text
    versions = [decode_header(content).format_version for content in other.files.values()]
    num_objects = PAGES * SHARDS_PER_PAGE
    assert sorted(versions) == [FORMAT_VERSION] * num_objects + [NEXT] * num_objects
    assert this.files.items() < other.files.items() == this_again.files.items()


def test_an_object_of_another_version_under_a_name_of_this_one_is_a_counted_miss_and_stays(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """Somebody renamed the objects of another release: their checksums are right."""
    model, store = tiny_llama(), tmp_path / "store"
    this = live(model, store)
    with raised_version(tmp_path / "raised"):
        live(model, store)
    objects = [path for path in store.rglob("*") if file_names.is_object(path.name)]
    by_shard = {parse_shard_name(path.name): path for path in objects}
    for name in map(parse_shard_name, this.files):
        (twin,) = [
            path
            for other, path in by_shard.items()
            if other != name and other._replace(namespace=name.namespace) == name
        ]
        by_shard[name].write_bytes(twin.read_bytes())
    before = {path.name: path.read_bytes() for path in objects}
    after = live(model, store, reason="other_version_objects")
    _assert_hit(after, 0)
    assert after.counters["fetch_ended/missing"] == 1
    assert after.counters["other_version_objects"] >= SHARDS_PER_PAGE
    assert after.files == before
    assert_same([after.answer], [this.answer], COLD_TOLERANCE)
