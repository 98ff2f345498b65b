"""How long a device takes for a step and a link for a copy: a few constants, measured once.

All of them are those of one NVIDIA H200 with a model of the Llama-8B shape (docs/benchmarks.md).
"""

from collections import Counter
from collections.abc import Iterable

from vllm_hicache.tiers import Direction

TOKEN_S = 23.0e-6
PAIR_S = 0.84e-9
"""Seconds to compute a token, and for each pair of a token and one before it. Cold prompts of
8,192, 32,768 and 65,536 tokens took 210, 1,206 and 3,314 ms ("Restore on one H200"): 23.0 us a
token and 0.42 ms for the square of each thousand tokens, within 4 %."""

WEIGHTS_S = 4.8e-3
"""A step is not shorter: it reads all weights. Requests of 640 tokens decoded in steps of 4.84 ms
alone, 5.31 ms by 16 and 6.76 ms by 64 ("Decoding beside saves")."""

CONTEXT_BYTES_PER_S = 2.8e12
"""What a step reads of the KV of requests that decode; from the same three, within 1 %."""

COPY_START_S = 0.3e-3
"""Assumed: from the start of a copy to its first byte, and from its last one to being seen."""

LAUNCH_S = 0.5e-3
"""Assumed: what scheduling and launching a batch takes on the CPU. Steps are longer, and so hide
it."""

IDLE_S = 1.0e-3
"""vLLM's engine sleeps for so long after a step that computed nothing."""


def step_s(rows: Iterable[tuple[int, int]], token_bytes: int) -> float:
    """Seconds of a step.

    rows         (new tokens, tokens before them) of each request
    token_bytes  of KV in all layers

    >>> round(step_s([(8192, 0)], 131072), 3), round(step_s([(1, 640)] * 64, 131072), 4)
    (0.217, 0.0067)
    """
    computing_s, reading_s = 0.0, 0.0
    for num_new, num_before in rows:
        computing_s += TOKEN_S * num_new
        if num_new > 1:
            computing_s += PAIR_S * num_new * (num_before + num_new / 2)
        else:
            reading_s += num_before * token_bytes / CONTEXT_BYTES_PER_S
    return max(WEIGHTS_S, computing_s) + reading_s


class HostLink:
    """The bus between a device and host memory: both directions at once, copies of one in turn."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = dict.fromkeys(Direction, 0.0)
        self.num_bytes: Counter[Direction] = Counter()

    def copy(self, direction: Direction, num_bytes: int, ready_s: float) -> float:
        """Enqueue a copy that may start at ``ready_s``; the moment at which it has ended."""
        start_s = max(ready_s, self._free_s[direction])
        end_s = start_s + COPY_START_S + self.copying_s(num_bytes)
        self._free_s[direction] = end_s
        self.num_bytes[direction] += num_bytes
        return end_s

    def copying_s(self, num_bytes: int) -> float:
        """Seconds that the bytes are under way."""
        return num_bytes / self._bytes_per_s
