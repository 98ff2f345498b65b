"""One KV cache group of vLLM within one pool: its blocks and its layers' places in pages."""

from functools import cached_property

import numpy as np
from torch import Tensor

from vllm_hicache.device_layout import DeviceGroup
from vllm_hicache.errors import ConfigError
from vllm_hicache.kernels.copy_units import CopyUnits
from vllm_hicache.kernels.dispatch import Path, relayouts
from vllm_hicache.kernels.part_grid import part_grids
from vllm_hicache.kernels.part_view import PartView
from vllm_hicache.kernels.unit_runs import UnitRuns
from vllm_hicache.layout import PageLayout, granule_tokens
from vllm_hicache.tiers import Direction


class GroupView:
    """The blocks of one group, cut into units, and the bytes of its layers in pages.

    kv_storage  flat, contiguous bytes of the whole KV buffer
    group       some layers of the pool that ``layout`` describes
    path        how units are moved within one memory; None: the fastest way here
    """

    def __init__(
        self,
        kv_storage: Tensor,
        group: DeviceGroup,
        layout: PageLayout,
        path: Path | None = None,
    ) -> None:
        _check_shapes(group, layout)
        first = group.layers[0]
        self.number = group.group
        self._units = CopyUnits(
            layout.page_size, group.block_size, first.block_size, first.num_blocks
        )
        self.units_per_page = self._units.per_page
        self.granules = (
            max(1, layout.page_size // group.block_size),
            max(1, group.block_size // layout.page_size),
        )
        """Of a page and of a block."""
        self._relayouts = relayouts(kv_storage, group, layout, self._units.num_tokens, path)
        self.needs_scratch = any(isinstance(each, PartView) for each in self._relayouts)
        """Whether units are moved by way of memory as large as they are."""
        self._grids = part_grids(group, layout, self._units.num_tokens)
        num_layers = sum(len(layers.layers) for layers in group.layers)
        layer_bytes = layout.num_head_groups * layout.layer_bytes
        self.unit_bytes = num_layers * layer_bytes // self.units_per_page
        """Of a unit of all layers of the group."""

    @cached_property
    def runs(self) -> UnitRuns:
        """What the copy engines can copy; made when it is asked for, as it may have a million
        entries where they are of no use."""
        return UnitRuns(self._grids)

    def units_of(self, copy_list: np.ndarray, num_slots: int) -> np.ndarray:
        """[n, 4] int64 rows (host slot, unit in page, kernel block, unit in kernel block)."""
        return self._units.of(copy_list, num_slots)

    def relayout(self, direction: Direction, rows: Tensor, pages: Tensor, scratch: Tensor) -> None:
        """Move the units of ``rows`` between blocks and ``pages``, all layers of the group.

        scratch  as many bytes as the units have, where ``needs_scratch``
        """
        for each in self._relayouts:
            each.move(direction, rows, pages, scratch)


def _check_shapes(group: DeviceGroup, layout: PageLayout) -> None:
    if not group.layers:
        raise ConfigError(f"KV cache group {group.group} has no layer in this pool")
    first = group.layers[0]
    want = (layout.num_heads, layout.row_bytes, first.block_size, first.num_blocks)
    for layers in group.layers:
        have = (layers.num_heads, layers.row_bytes, layers.block_size, layers.num_blocks)
        if have != want or group.block_size % layers.block_size:
            raise ConfigError(
                f"layers of one KV cache group share heads, row bytes, kernel block size (a "
                f"divisor of {group.block_size}) and number of blocks {want}, got {have}"
            )
        if layers.whole_blocks:
            granule_tokens(layout.page_size, layers.block_size, whole_blocks=True)
