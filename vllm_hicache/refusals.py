"""Offers of a load that vLLM did not take: up to where, why, how often in a row and since when.

vLLM starts a load in the background only where free blocks are left over after what requests under
way still need; for a request without one it needs the free blocks alone.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Refusals:
    """Of one request since it arrived or was preempted."""

    end: int = 0
    """Last token of the longest offer."""
    reason: str = "no_blocks"
    """Why its tokens are computed, should host lose them before they are offered again."""
    count: int = 0
    """Background loads that were offered and not taken, in a row."""
    since: float = 0.0
    """When the first of them was seen to be refused."""

    def note(self, end: int, now: float, *, is_async: bool) -> None:
        """vLLM looks the request up again: it had no room for what was offered."""
        self.end, self.reason = max(self.end, end), "no_blocks"
        if not is_async:
            self.count = 0
            return
        if not self.count:
            self.since = now
        self.count += 1

    def waited(self, now: float) -> float:
        """Seconds that background loads have been refused in a row; 0 while none was."""
        return now - self.since if self.count else 0.0
