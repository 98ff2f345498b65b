"""A worker's progress as the scheduler reads it from shared memory."""

from collections.abc import Iterator

import pytest

from vllm_hicache.plan import Direction
from vllm_hicache.progress import Outcome, ProgressJoin, WorkerProgress
from vllm_hicache.progress_board import RING, BoardReader, ProgressBoard, WorkerBoards


@pytest.fixture
def board() -> Iterator[ProgressBoard]:
    board = ProgressBoard()
    yield board
    board.close()


@pytest.fixture
def reader(board: ProgressBoard) -> Iterator[BoardReader]:
    reader = BoardReader.open(board.path, board.token)
    assert reader is not None
    yield reader
    reader.close()


def test_a_reader_sees_both_directions_with_their_copy_times(board, reader):
    board.publish(Direction.SAVE, 3, True, 0.5)
    board.publish(Direction.LOAD, 7, True, 0.25)
    board.publish(Direction.LOAD, 8, True, 0.5)
    expected = WorkerProgress(saves_done=3, loads_done=8, save_busy_s=0.5, load_busy_s=0.75)
    assert reader.read() == board.read() == expected


@pytest.mark.parametrize("direction", Direction)
def test_a_reader_sees_which_copies_failed(board, reader, direction):
    board.publish(direction, 1, True, 0.0)
    assert reader.read().failed(direction) == ()
    board.publish(direction, 2, False, 0.0)
    board.publish(direction, 3, True, 0.0)
    board.publish(direction, 4, False, 0.0)
    assert reader.read().failed(direction) == (2, 4)
    other = next(d for d in Direction if d is not direction)
    assert reader.read().failed(other) == ()


def test_more_failures_than_the_ring_holds_are_all_in_doubt(board, reader):
    for op_id in range(1, 2 * RING + 1):
        board.publish(Direction.SAVE, op_id, False, 0.0)
    progress = reader.read()
    in_doubt = {*progress.failed_saves, *range(1, progress.saves_in_doubt + 1)}
    assert in_doubt == set(range(1, 2 * RING + 1))


def test_an_unchanged_board_reads_as_the_same_object(board, reader):
    first = reader.read()
    assert reader.read() is first
    board.publish(Direction.SAVE, 1, True, 0.0)
    second = reader.read()
    assert second is not first
    assert reader.read() is second


def test_a_repeated_reading_changes_nothing_and_a_new_one_counts(board, reader):
    join = ProgressJoin(1)
    board.publish(Direction.SAVE, 1, True, 0.0)
    join.update(0, reader.read())
    join.update(0, reader.read())
    assert join.consume(Direction.SAVE) == [Outcome(Direction.SAVE, 1, True)]
    board.publish(Direction.SAVE, 2, False, 0.0)
    join.update(0, reader.read())
    assert join.consume(Direction.SAVE) == [Outcome(Direction.SAVE, 2, False)]
    assert join.num_ignored == 0


def test_host_slots_are_told_beside_the_copies_and_joined_by_the_slowest_worker():
    boards, readers, join = [ProgressBoard(), ProgressBoard()], WorkerBoards(), ProgressJoin(2, 4)
    for worker_id, board in enumerate(boards):
        readers.open(worker_id, board.path, board.token)
    boards[0].publish_slots(16, 0)
    boards[0].publish(Direction.SAVE, 1, True, 0.0)
    readers.tell(join)
    assert readers.readers[0].read() == WorkerProgress(saves_done=1, slots_ready=16)
    assert join.take_slots() == (4, 0)
    boards[1].publish_slots(8, 24)
    readers.tell(join)
    assert join.has_new_slots
    assert join.take_slots() == (8, 24)
    assert (join.has_new_slots, join.num_short_workers) == (False, 1)
    readers.close()
    for board in boards:
        board.close()


def test_a_board_of_another_host_is_left_out():
    readers, join = WorkerBoards(), ProgressJoin(1)
    readers.open(0, "/proc/self/fd/999999", 1)
    readers.tell(join)
    assert (readers.readers, join.has_new_slots) == ({}, False)


def test_a_board_with_another_token_is_not_read(board):
    assert BoardReader.open(board.path, board.token ^ 1) is None
    assert BoardReader.open("/proc/self/fd/999999", board.token) is None


def test_signs_of_life_and_steps_are_seen_beside_the_copies(board, reader):
    assert reader.signs() == (0, 0, 0, 0, 0)
    board.beat()
    board.beat()
    board.begin_step(7)
    board.end_step(6)
    board.publish(Direction.SAVE, 3, True, 0.5)
    board.publish(Direction.LOAD, 4, False, 0.5)
    assert reader.signs() == (2, 7, 6, 3, 4)
    assert reader.read() == board.read()
