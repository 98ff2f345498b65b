"""All storage processes as one partner: joined answers, one number, one fate."""

from itertools import permutations

import pytest
from planner_rig import ScriptedChannels

from vllm_hicache.storage_channel import ChannelDown, ChannelUp
from vllm_hicache.storage_link import StorageLink, WorldAnswer
from vllm_hicache.storage_messages import Cancel, Drained


def _link(num_workers: int = 2) -> tuple[StorageLink, ScriptedChannels]:
    channels = ScriptedChannels(num_workers)
    channels.inbox = [(i, ChannelUp(1)) for i in range(num_workers)]
    link = StorageLink(channels, num_workers)
    list(link.poll())
    return link, channels


def test_pages_count_when_every_worker_has_them():
    answer = WorldAnswer(3)
    for worker_id, pages in enumerate((6, 4, 5)):
        answer.advance(worker_id, pages)
    assert answer.agreed == 4


def test_progress_never_goes_back():
    answer = WorldAnswer(1)
    answer.advance(0, 4)
    answer.advance(0, 2)
    assert answer.agreed == 4


def test_nothing_changes_a_final_number():
    answer = WorldAnswer(1)
    answer.advance(0, 4)
    assert answer.settle(0, "corrupt")
    assert not answer.advance(0, 6)
    assert not answer.settle(0, "complete")
    assert (answer.agreed, answer.reason) == (4, "corrupt")


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_an_operation_is_settled_and_released_by_the_last_worker_whatever_the_order(order):
    answer = WorldAnswer(3)
    for number, worker_id in enumerate(order):
        assert (answer.is_settled, answer.is_released) == (False, False)
        answer.settle(worker_id, "complete")
        answer.released.add(worker_id)
        assert len(answer.released) == number + 1
    assert (answer.is_settled, answer.is_released) == (True, True)


def test_the_reason_is_that_of_the_worker_that_fell_shortest():
    answer = WorldAnswer(2)
    answer.advance(0, 6)
    answer.settle(0, "complete")
    answer.advance(1, 4)
    answer.settle(1, "missing")
    assert answer.reason == "missing"


def test_parts_are_there_when_every_worker_has_them():
    answer = WorldAnswer(3)
    for worker_id, parts in enumerate((b"\x07\x03\x01\xff", b"\x07\x06\x05\xff\x07", b"\xff" * 9)):
        answer.note_parts(worker_id, parts)
    assert answer.agreed_parts(4) == [7, 2, 1, 255]
    assert answer.agreed_parts(2) == [7, 2]
    assert answer.agreed_parts(0) == []


def test_parts_that_one_worker_has_said_nothing_of_count_as_absent():
    answer = WorldAnswer(2)
    answer.note_parts(0, b"\x07\x07\x07")
    assert answer.agreed_parts(3) == [0, 0, 0]
    answer.note_parts(1, b"")
    assert answer.agreed_parts(3) == [0, 0, 0]
    answer.note_parts(1, b"\x05")
    assert answer.agreed_parts(3) == [5, 0, 0]


def test_where_no_page_has_parts_none_are_agreed_on():
    answer = WorldAnswer(2)
    for worker_id in range(2):
        answer.note_parts(worker_id, b"")
    assert answer.agreed_parts(3) == [0, 0, 0]


def test_the_first_word_of_a_worker_about_its_parts_counts():
    answer = WorldAnswer(1)
    answer.note_parts(0, b"\x01\x00")
    answer.note_parts(0, b"\x07\x07")
    assert answer.agreed_parts(2) == [1, 0]


def test_a_message_goes_to_all_workers_or_to_none():
    link, channels = _link()
    assert link.broadcast(Cancel(1))
    channels.inbox = [(1, ChannelDown())]
    list(link.poll())
    assert not link.is_up
    assert not link.broadcast(Cancel(2))
    assert channels.sent == [[Cancel(1)], [Cancel(1)]]


def test_a_worker_that_could_not_be_told_counts_as_unavailable_and_quiet():
    link, channels = _link()
    channels.refusing = {1}
    answer = WorldAnswer(2)
    assert link.broadcast(Cancel(1), answer)
    assert (answer.settled, answer.released) == ([None, "unavailable"], {1})


def test_numbers_are_never_used_again():
    link, _ = _link()
    assert [link.next_number() for _ in range(3)] == [1, 2, 3]


def test_a_process_that_came_back_within_one_poll_gets_nothing_before_its_death_is_told():
    link, channels = _link(num_workers=1)
    channels.inbox = [(0, Drained()), (0, ChannelDown()), (0, ChannelUp(2)), (0, Drained())]
    could_send = [link.broadcast(Cancel(i)) for i, _ in enumerate(link.poll())]
    assert could_send == [False, False, True, True]
    assert link.incarnation(0) == "2"


def test_a_process_that_died_twice_within_one_poll_is_up_after_its_last_start():
    link, channels = _link(num_workers=1)
    downs_and_ups = [ChannelDown(), ChannelUp(2), ChannelDown(), ChannelUp(3)]
    channels.inbox = [(0, event) for event in downs_and_ups]
    could_send = [link.broadcast(Cancel(i)) for i, _ in enumerate(link.poll())]
    assert could_send == [False, False, False, True]
    assert link.incarnation(0) == "3"


def test_the_death_of_one_worker_does_not_hide_the_start_of_another():
    channels = ScriptedChannels(2)
    link = StorageLink(channels, 2)
    channels.inbox = [(0, ChannelUp(1)), (0, ChannelDown()), (1, ChannelUp(1)), (0, ChannelUp(2))]
    assert len(list(link.poll())) == 4
    assert link.is_up
