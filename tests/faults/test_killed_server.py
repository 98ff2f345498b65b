"""A whole server is killed while it saves; the next one on its store answers right."""

import pytest
from client_load import load_on
from live_server import (
    PAGE,
    Answer,
    prompt_of,
    serving,
    stored_files,
    temporary_files,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.full]

MAX_DIFFERENCE = 1e-4  # of log-probabilities that another chunking of the prompt gives


def _assert_alike(answer: Answer, control: Answer) -> None:
    assert answer.tokens == control.tokens
    assert answer.logprobs == pytest.approx(control.logprobs, abs=MAX_DIFFERENCE)


def test_a_server_killed_while_saving_leaves_nothing_wrong_behind(tiny_llama, tmp_path):
    model = tiny_llama()
    with serving(model, tmp_path) as server:
        # Clients of 20 pages each: objects are being written when the third page is answered.
        with load_on(server, num_tokens=20 * PAGE + 1) as outcomes:
            wait_until(lambda: len(stored_files(tmp_path)) >= 60)
            server.kill()
        answered = [outcome for outcome in outcomes if outcome.answer is not None]
    assert len(answered) < len(outcomes)  # some were under way

    with serving(model, tmp_path, log="second.log") as server:
        assert temporary_files(tmp_path) == []
        num_cached = 0
        for outcome in answered:
            again = server.complete(outcome.prompt, max_tokens=8)
            _assert_alike(again, outcome.answer)
            num_cached += again.cached_tokens
        assert num_cached >= 20 * PAGE
        fresh = prompt_of(7, 3 * PAGE)
        assert server.complete(fresh).cached_tokens == 0
        server.nudge()
        assert server.count("corrupt_objects_total") == 0
