"""The one line of the log that says why storage does not hit: other engines write almost the same.

Lives in the scheduler, so that it is said once per engine and not per worker.
"""

import logging
from collections.abc import Iterable

from vllm_hicache.metrics import Metrics
from vllm_hicache.namespace_records import near_miss_line, near_misses, record_digest

logger = logging.getLogger(__name__)


class NearMissNotice:
    """Says each finding once: a restarted storage process finds the same again."""

    def __init__(self, own_record: bytes, metrics: Metrics) -> None:
        self._own = own_record
        self._metrics = metrics
        self._said: set[str] = set()

    def tell(self, records: Iterable[bytes]) -> None:
        """Log a warning about these records, unless it was logged before."""
        near = near_misses(self._own, {record_digest(record): record for record in records})
        line = near_miss_line(near)
        if near and line not in self._said:
            self._said.add(line)
            self._metrics.count("near_misses")
            logger.warning("%s", line)
