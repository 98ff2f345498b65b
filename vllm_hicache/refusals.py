"""Offers of a load that vLLM did not take: up to where, why, how often in a row and since when.

vLLM starts a load in the background only where free blocks are left over after what prompts under
way still need; for a request without one it needs the free blocks alone.
"""

from dataclasses import dataclass

PATIENCE = 8
"""A load is given up once it was kept out for so many times as long as computing its tokens takes.
While there are no free blocks, nothing is lost by waiting: computing needs the same ones. While
there are, prompts under way hold them in reserve; those go on whatever this request does, and its
own computing would begin behind them and take the device from everybody once more. One such time
is common under load, where giving up would make the load worse."""


@dataclass(slots=True)
class Refusals:
    """Of one request since it arrived or was preempted."""

    end: int = 0
    """Last token of the longest offer."""
    reason: str = "no_blocks"
    """Why its tokens are computed, should host lose them before they are offered again."""
    count: int = 0
    """Background loads that were offered and not taken, in a row."""
    since: float | None = None
    """Since when each of them was refused although there were free blocks for the request."""

    def note(self, end: int, *, is_async: bool) -> None:
        """vLLM looks the request up again: it had no room for what was offered."""
        self.end, self.reason = max(self.end, end), "no_blocks"
        self.count = self.count + 1 if is_async else 0

    def is_shut_out(self, *, has_room: bool, recompute_s: float | None, now: float) -> bool:
        """Whether waiting on is hopeless; asked at each lookup that would offer a background load.

        has_room     the device has free blocks for the request without a load
        recompute_s  seconds to compute the tokens; None while unknown
        """
        if not self.count or not has_room:
            self.since = None
            return False
        if self.since is None:
            self.since = now
        return recompute_s is not None and now - self.since >= PATIENCE * recompute_s
