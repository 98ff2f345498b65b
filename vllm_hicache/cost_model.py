"""Moving averages from which waiting and loading are judged. Pure: the caller brings the times."""

from dataclasses import dataclass

SMOOTHING = 0.2
"""Weight of a new sample: the last ten samples make up nine tenths of the average."""
MIN_PREFILL_TOKENS = 256
"""Steps with fewer scheduled tokens say little of prefill speed."""
MIN_PREFILL_SAMPLES = 8
"""Before that, the first steps (compilation, warm-up) would set the estimate."""
MIN_SPREAD = 0.1
"""Amounts must differ by this part of their mean before latency and rate are told apart."""
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


@dataclass(slots=True)
class Line:
    """Seconds of a transfer = latency + amount x seconds per unit, from moving sums of samples.

    >>> line = Line()
    >>> for amount in (100, 300, 200): line.add(amount, 2.0 + 0.01 * amount)
    >>> round(line.seconds(1000), 3)
    12.0
    """

    _weight: float = 0.0
    _amount: float = 0.0
    _seconds: float = 0.0
    _square: float = 0.0
    _product: float = 0.0

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def add(self, amount: float, seconds: float) -> None:
        if amount <= 0 or seconds <= 0:
            return
        keep = 1.0 - SMOOTHING
        self._weight = self._weight * keep + 1.0
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + seconds
        self._square = self._square * keep + amount * amount
        self._product = self._product * keep + amount * seconds

    def fit(self) -> tuple[float, float]:
        """(latency in seconds, seconds per unit). While all samples are of about one amount, the
        time counts as proportional to it."""
        if not self._weight:
            return 0.0, 0.0
        amount, seconds = self._amount / self._weight, self._seconds / self._weight
        spread = self._square / self._weight - amount * amount
        per_unit = seconds / amount
        if spread > (MIN_SPREAD * amount) ** 2:
            slope = (self._product / self._weight - amount * seconds) / spread
            per_unit = min(max(slope, 0.0), per_unit)
        return max(0.0, seconds - per_unit * amount), per_unit

    def seconds(self, amount: float) -> float:
        latency, per_unit = self.fit()
        return latency + per_unit * amount


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
        self._load = Line()
        self._fetch = Line()
        self.num_samples = 0
        """Changes with every sample: estimates stay as they are while it does."""

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step with this many tokens took so long."""
        if num_tokens >= MIN_PREFILL_TOKENS:
            self.num_samples += 1
            self._prefill.add(num_tokens, seconds)

    def copied(self, num_bytes: int, seconds: float) -> None:
        """The slowest worker copied so many bytes host -> device."""
        self.num_samples += 1
        self._copy.add(num_bytes, seconds)

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """An asynchronous load of so many bytes on the slowest worker took so long, from the
        lookup to the acknowledgement of all workers, on an engine without other work.

        Beside other work it ends with a step of others. A request that computes its tokens waits
        for those as well, and they grow with what is computed: judged by times under load, an
        engine under load computed everything.
        """
        self.num_samples += 1
        self._load.add(num_bytes, seconds)

    def fetched(self, num_tokens: int, seconds: float) -> None:
        """So many tokens came from storage in so many seconds, question included."""
        self.num_samples += 1
        self._fetch.add(num_tokens, seconds)

    def stalled(self, num_tokens: int, seconds: float) -> None:
        """Not even so many tokens came from storage in so many seconds. Less than was expected
        anyhow says nothing."""
        if seconds > self._fetch.seconds(num_tokens):
            self.num_samples += 1
            self._fetch.add(num_tokens, seconds)

    def async_load_s(self, num_bytes: int) -> float:
        """Time until an asynchronous load has landed on an engine without other work."""
        return max(self._load.seconds(num_bytes), self.load_s(num_bytes))

    def fetch_s(self, num_tokens: int) -> float | None:
        """Time to bring these tokens from storage to host; None while unknown."""
        return self._fetch.seconds(num_tokens) if self._fetch.is_known else None

    def load_line(self) -> tuple[float, float]:
        """(latency, seconds per byte) of asynchronous loads."""
        latency, per_byte = self._load.fit()
        return latency, max(per_byte, self.load_s(1))

    def fetch_line(self) -> tuple[float, float] | None:
        """(latency, seconds per token) of fetches; None while unknown."""
        return self._fetch.fit() if self._fetch.is_known else None

    def recompute_s(self, num_tokens: int) -> float | None:
        """Time to compute these tokens; None while unknown."""
        if self._prefill.value is None or self._prefill.num_samples < MIN_PREFILL_SAMPLES:
            return None
        return num_tokens / self._prefill.value

    def load_s(self, num_bytes: int) -> float:
        """Time of a host -> device copy on one worker."""
        return num_bytes / (self._copy.value or ASSUMED_COPY_BYTES_PER_S)
