"""Moving averages from which waiting and loading are judged. Pure: the caller brings the times."""

from dataclasses import dataclass

SMOOTHING = 0.2
"""Weight of a new sample: the last ten samples make up nine tenths of the average."""
MIN_PREFILL_TOKENS = 256
"""Steps with fewer scheduled tokens say little of prefill speed."""
MIN_PREFILL_SAMPLES = 8
"""Before that, the first steps (compilation, warm-up) would set the estimate."""
ASSUMED_COPY_BYTES_PER_S = 8e9
"""Until a copy was measured: less than any PCIe link and more than most hosts' memcpy."""


@dataclass(slots=True)
class Average:
    """Exponential moving average of a rate in units per second."""

    value: float | None = None
    num_samples: int = 0

    def add(self, amount: float, seconds: float) -> None:
        if amount <= 0 or seconds <= 0:
            return
        rate = amount / seconds
        self.num_samples += 1
        if self.value is None:
            self.value = rate
        else:
            self.value += SMOOTHING * (rate - self.value)


class CostModel:
    """Estimates in seconds.

    >>> model = CostModel()
    >>> model.recompute_s(1000) is None
    True
    >>> for _ in range(MIN_PREFILL_SAMPLES): model.prefilled(1024, 0.1)
    >>> round(model.recompute_s(10_240), 3)
    1.0
    """

    def __init__(self) -> None:
        self._prefill = Average()
        self._copy = Average()

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step with this many tokens took so long."""
        if num_tokens >= MIN_PREFILL_TOKENS:
            self._prefill.add(num_tokens, seconds)

    def copied(self, num_bytes: int, seconds: float) -> None:
        """The slowest worker copied so many bytes host -> device."""
        self._copy.add(num_bytes, seconds)

    def recompute_s(self, num_tokens: int) -> float | None:
        """Time to compute these tokens; None while unknown."""
        if self._prefill.value is None or self._prefill.num_samples < MIN_PREFILL_SAMPLES:
            return None
        return num_tokens / self._prefill.value

    def load_s(self, num_bytes: int) -> float:
        """Time of a host -> device copy on one worker."""
        return num_bytes / (self._copy.value or ASSUMED_COPY_BYTES_PER_S)
