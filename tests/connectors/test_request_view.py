"""Page keys of vLLM's own Request objects: what shares pages with what."""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, StreamingUpdate

from vllm_hicache.connectors.request_view import RequestTokens

pytestmark = pytest.mark.vllm
PAGE = 16
TOKENS = list(range(100, 100 + 5 * PAGE))


def keys(num_pages=5, page_size=PAGE, **options):
    """Page hashes of a request as the scheduler would see it."""
    request = make_request(**options)
    return list(RequestTokens(request, page_size, None).page_hashes(num_pages))


def make_request(tokens=TOKENS, **options):
    return Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        **options,
    )


def image(identifier, offset, length=PAGE):
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def num_shared(some, others):
    """Leading pages that two requests share; behind the first other one nothing is shared."""
    same = [a == b for a, b in zip(some, others, strict=True)]
    first = same.index(False) if False in same else len(same)
    assert not any(same[first:])
    return first


def test_equal_tokens_have_equal_keys_and_a_changed_token_changes_all_behind_it():
    changed = [*TOKENS[: 2 * PAGE], 7, *TOKENS[2 * PAGE + 1 :]]
    assert num_shared(keys(), keys()) == 5
    assert num_shared(keys(), keys(tokens=changed)) == 2


def test_generated_tokens_get_the_keys_of_the_same_tokens_in_a_prompt():
    request = make_request(tokens=TOKENS[: PAGE + 3])
    tokens = RequestTokens(request, PAGE, None)
    assert len(tokens.page_hashes(1)) == 1
    request.append_output_token_ids(TOKENS[PAGE + 3 : 3 * PAGE])
    assert list(tokens.page_hashes(3)) == keys(3)


def test_the_same_image_at_the_same_place_shares_its_pages():
    here = [image("cat", PAGE + 4)]
    assert num_shared(keys(mm_features=here), keys(mm_features=list(here))) == 5


@pytest.mark.parametrize(
    ("features", "shared"),
    [
        ([], 1),
        ([image("dog", PAGE + 4)], 1),
        ([image("cat", PAGE + 5)], 1),
        ([image("cat", 2 * PAGE + 4)], 1),
        ([image("cat", PAGE + 4, PAGE - 1)], 1),
        ([image("cat", PAGE + 4), image("cat", 3 * PAGE)], 3),
        ([image("cat", PAGE + 4), image("dog", 4 * PAGE, 1)], 4),
    ],
)
def test_another_image_or_place_shares_only_the_pages_before_it(features, shared):
    assert num_shared(keys(mm_features=[image("cat", PAGE + 4)]), keys(mm_features=features)) == (
        shared
    )


def test_an_image_over_several_pages_is_in_each_of_them():
    large = [image("map", 4, 3 * PAGE)]
    assert num_shared(keys(mm_features=large), keys(mm_features=[image("map", 4, PAGE)])) == 0
    assert num_shared(keys(mm_features=large), keys()) == 0


def test_two_images_are_not_one_whose_name_is_that_of_both():
    both = [image("a", 0, 4), image("b", 4, 4)]
    assert num_shared(keys(mm_features=both), keys(mm_features=[image("ab", 0, 8)])) == 0
    swapped = [image("b", 0, 4), image("a", 4, 4)]
    assert num_shared(keys(mm_features=both), keys(mm_features=swapped)) == 0
    # In whatever order vLLM lists them.
    assert num_shared(keys(mm_features=both), keys(mm_features=both[::-1])) == 5


def embeddings(seed=0, pages=5):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(pages * PAGE, 8, generator=source)


def test_prompt_embeddings_are_keyed_page_by_page():
    embeds = embeddings()
    changed = embeds.clone()
    changed[3 * PAGE + 2, 5] += 1e-6
    some = keys(tokens=None, prompt_embeds=embeds)
    assert num_shared(some, keys(tokens=None, prompt_embeds=embeds.clone())) == 5
    assert num_shared(some, keys(tokens=None, prompt_embeds=changed)) == 3
    longer = torch.cat([embeds[: 4 * PAGE], embeddings(1)])
    assert num_shared(some, keys(tokens=None, prompt_embeds=longer)) == 4


def test_prompt_embeddings_share_nothing_with_token_ids_or_another_type():
    embeds = embeddings()
    some = keys(tokens=None, prompt_embeds=embeds)
    # vLLM gives such a request zeros as token ids.
    assert num_shared(some, keys(tokens=[0] * 5 * PAGE)) == 0
    zeros = torch.zeros(5 * PAGE, 8)
    halves = torch.zeros(5 * PAGE, 16, dtype=torch.float16)
    some = keys(tokens=None, prompt_embeds=zeros)
    assert num_shared(some, keys(tokens=None, prompt_embeds=halves)) == 0


def test_in_a_mixed_prompt_a_token_is_not_the_embedding_beside_it():
    embeds = embeddings()
    mask = [True] * PAGE + [False] * PAGE + [True] * 3 * PAGE
    mixed = {"prompt_embeds": embeds, "prompt_is_token_ids": mask}
    assert num_shared(keys(**mixed), keys(**mixed)) == 5
    # Token 0 and an embedding are both token id 0 to the scheduler.
    tokens = [*TOKENS[:PAGE], *[0] * PAGE, *TOKENS[2 * PAGE :]]
    as_tokens = keys(tokens=tokens, prompt_embeds=embeds, prompt_is_token_ids=[True] * 5 * PAGE)
    assert num_shared(keys(**mixed), as_tokens) == 1


def test_what_was_generated_behind_prompt_embeddings_is_keyed_by_its_tokens():
    def answered(last):
        request = make_request(tokens=None, prompt_embeds=embeddings(pages=1))
        request.append_output_token_ids([*range(PAGE - 1), last])
        return list(RequestTokens(request, PAGE, None).page_hashes(2))

    assert num_shared(answered(1), answered(1)) == 2
    assert num_shared(answered(1), answered(2)) == 1


def stream(session, tokens, features=None):
    """What vLLM does to a request whose next part arrives."""
    update = StreamingUpdate(
        mm_features=features,
        prompt_token_ids=tokens,
        max_tokens=4,
        arrival_time=0.0,
        sampling_params=SamplingParams(max_tokens=4),
    )
    scheduler = SimpleNamespace(
        hash_block_size=PAGE, num_waiting_for_streaming_input=0, log_stats=False
    )
    Scheduler._update_request_as_session(scheduler, session, update)


def test_a_streamed_prompt_has_the_keys_of_the_tokens_that_were_computed():
    session = make_request(tokens=TOKENS[: PAGE - 2], resumable=True)
    tokens = RequestTokens(session, PAGE, None)
    session.append_output_token_ids([7, 8])
    session.num_computed_tokens = PAGE - 1
    assert len(tokens.page_hashes(1)) == 1  # with the 8 that the next part takes the place of
    stream(session, TOKENS[:PAGE])
    same = [*TOKENS[: PAGE - 2], 7, *TOKENS[:PAGE]]
    assert list(tokens.page_hashes(1)) == keys(1, tokens=same)


def test_an_image_that_comes_with_a_later_part_of_a_prompt_is_in_its_pages():
    def streamed(identifier):
        session = make_request(tokens=TOKENS[:PAGE], resumable=True)
        tokens = RequestTokens(session, PAGE, None)
        first = list(tokens.page_hashes(1))
        session.num_computed_tokens = PAGE
        stream(session, TOKENS[PAGE : 3 * PAGE], [image(identifier, PAGE + 2, 4)])
        assert tokens.page_hashes(3)[:1] == first
        return list(tokens.page_hashes(3))

    assert num_shared(streamed("cat"), streamed("cat")) == 3
    assert num_shared(streamed("cat"), streamed("dog")) == 2
    whole = keys(3, mm_features=[image("cat", 2 * PAGE + 2, 4)])
    assert num_shared(streamed("cat"), whole) == 3


@pytest.mark.parametrize(
    ("salt", "other"),
    [("x", "y"), ("x", None), ("x", "x\0"), ("\u00e9", "e\u0301"), ("x" * 4096, "x" * 4097)],
)
def test_another_salt_shares_nothing(salt, other):
    assert num_shared(keys(cache_salt=salt), keys(cache_salt=salt)) == 5
    assert num_shared(keys(cache_salt=salt), keys(cache_salt=other)) == 0


def test_an_empty_salt_is_none_as_it_is_to_vllm():
    assert num_shared(keys(cache_salt=""), keys(cache_salt=None)) == 5


def test_a_salt_is_not_the_adapter_of_the_same_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter = LoRARequest("x", 1, str(tmp_path))
    assert num_shared(keys(lora_request=adapter), keys(cache_salt="x")) == 0
    assert num_shared(keys(lora_request=adapter), keys()) == 0
    assert num_shared(keys(lora_request=adapter), keys(lora_request=adapter)) == 5


def test_a_salt_with_a_lone_surrogate_is_a_key_like_any_other():
    assert num_shared(keys(cache_salt="\ud800"), keys(cache_salt="\ud800")) == 5
    assert num_shared(keys(cache_salt="\ud800"), keys(cache_salt="?")) == 0
