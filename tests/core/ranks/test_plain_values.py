"""Plain values: equal in every process for equal things, and small."""

import subprocess
import sys
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest

from vllm_hicache.plain_values import MAX_ITEMS, MAX_TEXT, plain
from vllm_hicache.plan import CopyOp, Direction
from vllm_hicache.storage_messages import FetchSettled


class Bare:
    """No fields, no words of its own."""


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Point:
    x: int
    names: tuple[str, ...]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (7, 7),
        (1.5, 1.5),
        ("a", "a"),
        (1 << 70, str(1 << 70)),
        ([1, [2, 3]], "[1, [2, 3]]"),
        ((), "[]"),
        ({"b": 1, "a": [2]}, "[['a', [2]], ['b', 1]]"),
        (frozenset({"y", "x"}), "['x', 'y']"),
        (b"\x01\xff", "01ff"),
        (np.int64(3), 3),
        (Colour.RED, "red"),
        (Direction.SAVE, "save"),
        (Point(1, ("a", "b")), "Point(x=1, names=['a', 'b'])"),
        (FetchSettled(3, 2, "missing"), "FetchSettled(op=3, num_pages=2, reason='missing')"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_value_becomes_plain(value, expected):
    assert plain(value) == expected


def test_an_object_without_fields_becomes_the_name_of_its_class():
    assert plain(Bare()) == "Bare"


def test_long_things_become_a_length_and_a_digest():
    items = list(range(MAX_ITEMS + 1))
    assert str(plain(items)).startswith("17 items ")
    assert plain(items) != plain([*items[:-1], 99])
    text = "x" * (MAX_TEXT + 1)
    assert len(str(plain(text))) < 60
    assert plain(text) != plain(text + "x")
    assert str(plain(bytes(100))).startswith("100 B ")
    assert plain(bytes(100)) != plain(bytes(99) + b"\1")


def test_arrays_differ_by_shape_type_and_every_number():
    rows = np.arange(8, dtype=np.int32)
    other = rows.copy()
    other[7] = 0
    arrays = [rows, rows.reshape(2, 4), rows.view(np.float32), other]
    assert len({plain(array) for array in arrays}) == 4
    assert plain(rows) == plain(rows.copy())
    assert plain(rows[::2]) == plain(rows[::2].copy())


def test_other_rows_of_a_copy_are_another_value():
    ops = [CopyOp(1, np.full((2, 4), n, np.int32)) for n in (0, 0, 1)]
    assert plain(ops[0]) == plain(ops[1]) != plain(ops[2])


def test_equal_things_are_equal_in_another_process():
    program = (
        "import numpy as np\n"
        "from vllm_hicache.plain_values import plain\n"
        "print(plain([{'b', 'a', 'c'}, np.arange(40), object(), 'y' * 500, {1: {'z', 'q'}}]))\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-P", "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1


def test_collections_that_differ_read_differently():
    collections = [["a, b"], ["a", "b"], [1], ["1"], ["a', 'b"], [None], ["None"], [[]], []]
    assert len({plain(collection) for collection in collections}) == len(collections)
