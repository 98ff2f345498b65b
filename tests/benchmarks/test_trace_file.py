"""Traces: what a line must have, which prompts it stands for, how it is scaled."""

import json
from pathlib import Path

import pytest

from vllm_hicache.benchmarks.trace_file import (
    TracePrompts,
    TraceRequest,
    distinct_tokens,
    parse_trace,
    read_trace,
    reusable_tokens,
    scale,
)
from vllm_hicache.errors import ConfigError

SAMPLE = Path(__file__).resolve().parent.parent / "data" / "trace-sample.jsonl"
GOOD = {"timestamp": 1500, "input_length": 600, "output_length": 20, "hash_ids": [4, 9]}
PROMPTS = TracePrompts(block_tokens=512, vocab_size=1000, seed=0)


def _parse(*tables, limit=None):
    lines = [t if isinstance(t, str) else json.dumps(t) for t in tables]
    return list(parse_trace(lines, "a.jsonl", limit))


def test_a_line_is_a_request():
    assert _parse(GOOD) == [TraceRequest(1.5, 600, 20, (4, 9))]


def test_empty_lines_and_further_keys_are_passed_over():
    assert len(_parse("", {**GOOD, "session": "x"}, "  \n", {**GOOD, "timestamp": 1500.25})) == 2


def test_a_limit_leaves_the_rest_unread():
    assert len(_parse(GOOD, "not JSON", limit=1)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": None}, "timestamp"),
        ({"timestamp": True}, "timestamp"),
        ({"timestamp": float("inf")}, "timestamp"),
        ({"timestamp": 100}, "earlier"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": "600"}, "input_length"),
        ({"output_length": 0}, "output_length"),
        ({"output_length": 1.5}, "output_length"),
        ({"output_length": True}, "output_length"),
        ({"hash_ids": None}, "hash_ids"),
        ({"hash_ids": [4]}, "must be 2 for an input_length of 600, got 1"),
        ({"hash_ids": [4, 9, 11]}, "got 3"),
        ({"hash_ids": [4, -9]}, "hash_ids"),
        ({"hash_ids": [4, "9"]}, "hash_ids"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(change, message):
    with pytest.raises(ConfigError, match=rf"a\.jsonl, line 3: .*{message}"):
        _parse(GOOD, "", {**GOOD, **change})


@pytest.mark.parametrize("line", ["{", "[]", "7", '{"timestamp": 1'])
def test_what_is_no_object_is_refused_with_its_number(line):
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: "):
        _parse(GOOD, line)


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(tmp_path / "empty.jsonl")


def test_shared_ids_share_tokens_and_others_do_not():
    first = PROMPTS.prompt(TraceRequest(0, 1100, 1, (1, 2, 3)))
    second = PROMPTS.prompt(TraceRequest(0, 1500, 1, (1, 2, 4)))
    assert (len(first), len(second)) == (1100, 1500)
    assert first[:1024] == second[:1024]
    assert first[1024:1100] != second[1024:1100]
    again = TracePrompts(512, 1000, 0).prompt(TraceRequest(5, 1100, 9, (1, 2, 3)))
    assert again == first
    assert TracePrompts(512, 1000, 1).prompt(TraceRequest(5, 1100, 9, (1, 2, 3))) != first


def test_a_shorter_last_block_is_the_beginning_of_the_block():
    longer = PROMPTS.prompt(TraceRequest(0, 1024, 1, (1, 2)))
    assert PROMPTS.prompt(TraceRequest(0, 700, 1, (1, 2))) == longer[:700]


@pytest.mark.parametrize("length_scale", [0.001, 0.1, 0.37, 1.0, 2.0])
def test_a_scaled_prompt_stays_within_its_blocks(length_scale):
    requests = [*read_trace(SAMPLE), TraceRequest(9.0, 2048, 1, (1, 2, 3, 4))]
    scaled, block_tokens = scale(requests, time_scale=4.0, length_scale=length_scale)
    prompts = TracePrompts(block_tokens, 1000, 0)
    for before, after in zip(requests, scaled, strict=True):
        assert after.arrival_s == before.arrival_s / 4
        assert len(prompts.prompt(after)) == after.input_tokens >= 1
        assert after.output_tokens >= 1
    if length_scale == 1.0:
        assert [r.input_tokens for r in scaled] == [r.input_tokens for r in requests]


def test_only_a_prefix_can_be_reused():
    requests = [
        TraceRequest(0, 1500, 10, (1, 2, 3)),
        TraceRequest(1, 1500, 10, (1, 2, 4)),  # 1,024 tokens
        TraceRequest(2, 1024, 10, (5, 2)),  # the second block follows another first one
        TraceRequest(3, 600, 10, (5, 2)),  # all 600
    ]
    assert reusable_tokens(requests, 512) == 1024 + 600
    assert distinct_tokens(requests, 512) == 40 + 1500 + 476 + 1024


def test_the_sample_has_sessions_that_share_and_grow():
    requests = read_trace(SAMPLE)
    assert len(requests) >= 12
    share = reusable_tokens(requests, 512) / sum(r.input_tokens for r in requests)
    assert 0.3 < share < 0.9
