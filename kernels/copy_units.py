"""From the copy list of a plan to the units that a copy can address with strides on both sides."""

from math import gcd

import numpy as np

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.layout import granule_tokens


class CopyUnits:
    """Cuts granules into units: the tokens that lie together in a page and in a kernel block.

    A granule is the smaller of page and scheduler block. A unit is the whole granule, unless
    vLLM splits its blocks for its kernels into smaller ones.
    """

    def __init__(
        self, page_size: int, block_size: int, kernel_block_size: int, num_kernel_blocks: int
    ) -> None:
        granule = granule_tokens(page_size, block_size)
        self.num_tokens = gcd(granule, kernel_block_size)
        self.per_page = page_size // self.num_tokens
        self._per_granule = granule // self.num_tokens
        self._per_kernel_block = kernel_block_size // self.num_tokens
        self._kernel_blocks = block_size // kernel_block_size  # of a block
        num_blocks = num_kernel_blocks // self._kernel_blocks
        self._limits = (page_size // granule, num_blocks, block_size // granule)

    def of(self, copy_list: np.ndarray, num_slots: int) -> np.ndarray:
        """[n, 4] int64 rows (host slot, unit in page, kernel block, unit in kernel block).

        copy_list  [n, 4] rows (host slot, granule in page, block id, granule in block)

        Refuses an index out of range: on a device it would end the process or hit other memory.
        """
        if copy_list.ndim != 2 or copy_list.shape[1] != 4:
            raise InvariantBroken(f"a copy list has shape [n, 4], got {copy_list.shape}")
        rows = copy_list.astype(np.int64)
        limits = (num_slots, *self._limits)
        wrong = ((rows < 0) | (rows >= limits)).any(axis=1)
        if wrong.any():
            raise InvariantBroken(f"copy {rows[wrong][0].tolist()} is not below {limits}")
        slot, granule, block, granule_in_block = rows.T[:, :, None]
        unit = np.arange(self._per_granule)
        kernel_block, unit_in_block = np.divmod(
            granule_in_block * self._per_granule + unit, self._per_kernel_block
        )
        units = np.broadcast_arrays(
            slot,
            granule * self._per_granule + unit,
            block * self._kernel_blocks + kernel_block,
            unit_in_block,
        )
        return np.stack(units, axis=-1).reshape(-1, 4)
