"""What workers say at start, taken together."""

import pytest

from vllm_hicache.connectors.messages import PageRows, WorkerHello, first_slots

pytestmark = pytest.mark.vllm


def _hello(worker_id: int, num_ready: int | None) -> WorkerHello:
    return WorkerHello(
        worker_id=worker_id,
        num_slots=64,
        page_bytes=4096,
        bytes_per_token=(64,),
        layout_digest=1,
        rows=PageRows("full_attention", 0, 64, "rows", 32, 32, 2, 1, 1),
        storage_address=None,
        board_path="",
        board_token=0,
        num_ready_slots=num_ready,
    )


@pytest.mark.parametrize(
    ("ready", "first"), [((8, 16), 8), ((16, 8, 12), 8), ((None, None), None), ((None, 8), 8)]
)
def test_the_first_slots_are_those_that_every_worker_has(ready, first):
    assert first_slots([_hello(i, number) for i, number in enumerate(ready)]) == first
