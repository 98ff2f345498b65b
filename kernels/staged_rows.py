"""Which units of several KV cache groups belong into which page of a staging buffer."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_SLOT = 0  # column of the host slot


class StagedRows(NamedTuple):
    """Units of several groups, each group's in the order of the pages, which are staged in turn.

    rows        [n, 4] int64 as of ``CopyUnits``, with the place in the staging buffer for the slot
    ends        per group [pages + 1]: the units of page i are ``rows[ends[i]:ends[i + 1]]``
    slots       [pages] host slots, ascending
    is_partial  [pages] whether some unit of some group is not among them
    """

    rows: np.ndarray
    ends: list[np.ndarray]
    slots: np.ndarray
    is_partial: np.ndarray


def stage(groups: list[np.ndarray], units_per_page: list[int], num_staged: int) -> StagedRows:
    """Order the units of every group by pages, of which ``num_staged`` fit into a buffer.

    >>> one, other = np.array([[7, 0, 3, 0], [4, 0, 5, 0]]), np.array([[4, 1, 9, 0]])
    >>> staged = stage([one, other], [1, 2], 8)
    >>> staged.rows[:, 0].tolist(), [ends.tolist() for ends in staged.ends]
    ([0, 1, 0], [[0, 1, 2], [2, 3, 3]])
    >>> staged.slots.tolist(), staged.is_partial.tolist()
    ([4, 7], [True, True])
    """
    slots = np.unique(np.concatenate([rows[:, _SLOT] for rows in groups]))
    is_partial = np.zeros(len(slots), dtype=bool)
    ordered, ends, begin = [], [], 0
    for rows, per_page in zip(groups, units_per_page, strict=True):
        pages = np.searchsorted(slots, rows[:, _SLOT])
        counts = np.bincount(pages, minlength=len(slots))
        is_partial |= counts < per_page
        order = np.argsort(pages, kind="stable")
        staged = rows[order]
        staged[:, _SLOT] = pages[order] % num_staged
        ordered.append(staged)
        ends.append(begin + np.concatenate(([0], np.cumsum(counts))))
        begin += len(rows)
    return StagedRows(np.concatenate(ordered), ends, slots, is_partial)


def sections(
    groups: list[np.ndarray], units_per_page: list[int], num_rows: int
) -> Iterator[list[np.ndarray]]:
    """Cut the units of several groups between pages, into at most ``num_rows`` units a time.

    >>> one, other = np.array([[7, 0, 3, 0], [4, 0, 5, 0]]), np.array([[4, 1, 9, 0]])
    >>> [[rows[:, _SLOT].tolist() for rows in each] for each in sections([one, other], [1, 2], 3)]
    [[[7, 4], [4]]]
    >>> [[rows[:, _SLOT].tolist() for rows in each] for each in sections([one, other], [1, 2], 2)]
    [[[4], [4]], [[7], []]]
    """
    if sum(map(len, groups)) <= num_rows:
        yield groups
        return
    slots = np.unique(np.concatenate([rows[:, _SLOT] for rows in groups]))
    step = max(1, num_rows // sum(units_per_page))
    for first in range(0, len(slots), step):
        low, high = slots[first], slots[min(first + step, len(slots)) - 1]
        yield [rows[(low <= rows[:, _SLOT]) & (rows[:, _SLOT] <= high)] for rows in groups]
