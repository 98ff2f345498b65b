"""Page hashes."""

import random
import subprocess
import sys
import time
from array import array
from hashlib import sha256
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.hashing import PageExtra, PageHashChain, chain_root

GOLDEN = [
    "6128dcd1fb889c04d76acfe1862c5ea57ec0281c5b10e0ffaae16e2e9e979b16",
    "1c3e291195fe3a3dbd873d6e467d601dace541ae59e7fad8226b75cfeda3d2e7",
    "4a6f4b138a790b8971e4aba60b6356c340d94f1ce6c9c11ea4abebd3cc427cd2",
]


def _hashes(token_ids, page_size=4, root=None, extras=()):
    chain = PageHashChain(page_size, chain_root() if root is None else root)
    chain.extend(token_ids, len(token_ids), extras)
    return chain.hashes


def test_hashes_never_change():
    extras = [PageExtra(5, 7, b"image")]
    root = chain_root(cache_salt="salt", lora=b"adapter")
    assert [h.hex() for h in _hashes([0, 1, 2**31, 2**32 - 1])] == GOLDEN[:1]
    assert [h.hex() for h in _hashes(range(8), root=root, extras=extras)] == GOLDEN[1:]


def test_hash_is_the_documented_chain():
    root = sha256(b"hicache-root-1" + b"\x00" * 5 + b"\x00" * 5).digest()
    first = sha256(root + pack("<4I", 10, 11, 12, 13)).digest()
    extra = pack("<qqI", -1, 2, 3) + b"abc"
    second = sha256(first + pack("<4I", 14, 15, 16, 17) + extra).digest()
    head = pack("<qqI", 3, 6, 3) + b"abc"
    assert _hashes(range(10, 18))[0] == first
    first_touched = sha256(root + pack("<4I", 10, 11, 12, 13) + head).digest()
    second_touched = sha256(first_touched + pack("<4I", 14, 15, 16, 17) + extra).digest()
    touched = _hashes(range(10, 18), extras=[PageExtra(3, 6, b"abc")])
    assert touched == [first_touched, second_touched] != [first, second]


def test_fresh_processes_agree_whatever_their_hash_seed():
    code = (
        "from vllm_hicache.hashing import *; c = PageHashChain(4, chain_root(cache_salt='s'));"
        "c.extend(list(range(64)), 64, [PageExtra(i, i + 9, b'%d' % i) for i in range(0, 50, 7)]);"
        "print(c.hashes[-1].hex())"
    )
    extras = [PageExtra(i, i + 9, b"%d" % i) for i in range(0, 50, 7)]
    expected = _hashes(range(64), root=chain_root(cache_salt="s"), extras=extras)[-1].hex()
    for seed in ("1", "2"):
        command = [sys.executable, "-P", "-c", code]
        result = subprocess.run(
            command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == expected


_EXTRAS = st.lists(
    st.builds(
        lambda start, length, identity: PageExtra(start, start + length, identity),
        st.integers(0, 60),
        st.integers(0, 30),
        st.binary(max_size=3),
    ),
    max_size=4,
)


@given(
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    page_size=st.integers(1, 9),
    extras=_EXTRAS,
)
def test_growing_step_by_step_equals_one_go(token_ids, cuts, page_size, extras):
    chain = PageHashChain(page_size, chain_root())
    total = 0
    for cut in [*sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]:
        total += chain.extend(token_ids[:cut], cut, extras)
        assert chain.num_tokens == cut - cut % page_size
    assert total == len(chain.hashes)
    assert chain.hashes == _hashes(token_ids, page_size, extras=extras)


@given(
    token_ids=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    position=st.integers(0, 39),
    page_size=st.integers(1, 5),
)
def test_another_token_changes_its_page_and_all_later_ones_only(token_ids, position, page_size):
    position %= len(token_ids)
    changed = [*token_ids[:position], 77, *token_ids[position + 1 :]]
    before, after = _hashes(token_ids, page_size), _hashes(changed, page_size)
    same = [a == b for a, b in zip(before, after, strict=True)]
    touched = position // page_size
    assert same == [page < touched for page in range(len(same))]


def test_extra_changes_the_pages_it_touches_and_their_followers_only():
    plain = _hashes(range(24))
    image = _hashes(range(24), extras=[PageExtra(9, 12, b"image")])
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, True] + [False] * 4


def test_extra_that_touches_no_page_changes_nothing():
    extras = [PageExtra(8, 12, b"later"), PageExtra(3, 3, b"empty")]
    assert _hashes(range(8), extras=extras) == _hashes(range(8))


def test_every_property_of_an_extra_is_part_of_the_hash():
    variants = [
        [],
        [PageExtra(1, 3, b"a")],
        [PageExtra(0, 3, b"a")],
        [PageExtra(1, 4, b"a")],
        [PageExtra(1, 3, b"b")],
        [PageExtra(1, 3, b"a"), PageExtra(1, 3, b"a")],
    ]
    assert len({_hashes(range(4), extras=extras)[0] for extras in variants}) == len(variants)


def test_order_of_extras_does_not_matter():
    extras = [PageExtra(0, 3, b"b"), PageExtra(0, 3, b"a"), PageExtra(2, 9, b"c")]
    assert _hashes(range(12), extras=extras) == _hashes(range(12), extras=extras[::-1])


def test_same_content_further_back_hashes_alike_relative_to_its_page():
    page = (7, 7, 7, 7)
    chained = _hashes(page, root=_hashes(page)[0], extras=[PageExtra(1, 2, b"x")])
    assert _hashes(page * 2, extras=[PageExtra(5, 6, b"x")])[1] == chained[0]


def test_roots_differ_by_salt_and_adapter_and_absence():
    variants = [
        {},
        {"cache_salt": ""},
        {"cache_salt": "a"},
        {"lora": b""},
        {"lora": b"a"},
        {"cache_salt": "a", "lora": b"a"},
    ]
    assert len({chain_root(**variant) for variant in variants}) == len(variants)


def test_any_sequence_of_the_same_tokens_hashes_alike():
    tokens = list(range(20))
    assert _hashes(tuple(tokens)) == _hashes(tokens) == _hashes(array("I", tokens))


def test_partial_page_and_repeated_calls_add_nothing():
    chain = PageHashChain(4, chain_root())
    assert chain.extend([1, 2, 3], 3) == 0
    assert chain.extend([1, 2, 3, 4, 5], 5) == 1
    assert chain.extend([1, 2, 3, 4, 5], 5) == 0
    assert chain.extend([1, 2, 3, 4, 5], 2) == 0


def test_hashing_beyond_the_tokens_breaks_an_invariant():
    with pytest.raises(InvariantBroken, match="8 tokens of 5"):
        PageHashChain(4, chain_root()).extend([1, 2, 3, 4, 5], 8)


def test_token_that_does_not_fit_is_refused():
    with pytest.raises(OverflowError):
        _hashes([0, 1, 2, -1])


def test_a_million_tokens_take_tens_of_milliseconds():
    token_ids = random.Random(0).choices(range(128_000), k=1_000_000)
    durations = []
    for _ in range(4):
        start = time.thread_time()
        _hashes(token_ids, page_size=256)
        durations.append(time.thread_time() - start)
    assert min(durations) < 0.150


def test_cost_of_a_step_does_not_grow_with_the_context():
    token_ids = list(range(1_000_000))
    chain = PageHashChain(256, chain_root())
    chain.extend(token_ids, 999_900)
    start = time.thread_time()
    for upto in range(999_900, 1_000_000):
        chain.extend(token_ids, upto)
    assert time.thread_time() - start < 0.010
