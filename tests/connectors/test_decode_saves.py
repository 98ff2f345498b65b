"""When a request that decodes is saved: vLLM's real scheduler, workers that copy at once."""

import pytest

from vllm_hicache.connectors.page_sizes import DECODE_SAVE_TOKENS, pages_per_decode_save
from vllm_hicache.pools import HitRule, KVGroup, ModelPools, Pool

pytestmark = pytest.mark.vllm

PAGE, PROMPT, OUTPUT = 32, 200, 400


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    # It sets vLLM's log level for its process.
    from vllm_hicache.benchmarks.scheduler_rig import RigOptions, SchedulerRig

    options = RigOptions(
        folder=tmp_path_factory.mktemp("rig"),
        max_tokens=1024,
        num_requests=4,
        num_tokens=4096,
        block_size=16,
        page_size=PAGE,
        batched_tokens=128,
        num_workers=1,
        has_storage=False,
    )
    with SchedulerRig(options) as made:
        yield made


def test_a_prompt_is_saved_as_it_is_computed_and_an_answer_256_tokens_at_a_time(rig):
    rig.scheduler.add_request(rig.new_request("a", list(range(1, PROMPT + 1)), OUTPUT))
    saved = []
    while rig.scheduler.has_requests():
        saved.append(rig.step().num_pages)
    assert saved[:2] == [128 // PAGE, PROMPT // PAGE - 128 // PAGE], "the two steps of the prompt"
    # 6 pages of the prompt; the answer's first 256 tokens are complete with page 14.
    decoding = [(step, pages) for step, pages in enumerate(saved[2:], 1) if pages]
    complete = (PROMPT // PAGE + DECODE_SAVE_TOKENS // PAGE) * PAGE - PROMPT
    rest = (PROMPT + OUTPUT - 1) // PAGE - PROMPT // PAGE - DECODE_SAVE_TOKENS // PAGE
    assert decoding[0] == (complete, DECODE_SAVE_TOKENS // PAGE)
    assert [pages for _, pages in decoding[1:]] == [rest], "when the request ended"


def test_a_decoding_request_with_windows_is_saved_page_by_page():
    full = ModelPools((), (KVGroup(16),), page_size=PAGE, unit=16)
    window = Pool("window-64", HitRule.WINDOW, (0,), reach=64, bit=0)
    mixed = ModelPools((window,), (KVGroup(16, bit=0), KVGroup(16)), page_size=PAGE, unit=16)
    assert pages_per_decode_save(full) == DECODE_SAVE_TOKENS // PAGE
    assert pages_per_decode_save(mixed) == 1
    assert pages_per_decode_save(ModelPools((), (KVGroup(16),), page_size=1024, unit=16)) == 1
