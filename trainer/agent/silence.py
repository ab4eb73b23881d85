"""How long another process has said nothing, as seen by one that may have slept itself."""

from __future__ import annotations


class Silence:
    """Times the silence of another process, not counting what this one has slept (Ctrl-Z, SIGSTOP, a frozen machine).

    Whoever slept could hear nobody. It must read first what has come meanwhile, so it waits for half of the limit more.

    Args:
        limit_seconds: what is too long.
        now: seconds of a monotonic clock, as for all methods.
    """

    def __init__(self, limit_seconds: float, now: float) -> None:
        self.limit_seconds = limit_seconds
        self._heard_at = self._looked_at = now

    def heard(self, now: float) -> None:
        """The other one has said something."""
        self._heard_at = now

    def slept(self, now: float) -> float:
        """Seconds since the last look, if they are so many that this process must have slept; 0 otherwise. It looks."""
        pause, self._looked_at = now - self._looked_at, now
        if pause <= self.limit_seconds / 2:
            return 0.0
        self._heard_at = max(self._heard_at, now - self.limit_seconds / 2)
        return pause

    def is_too_long(self, now: float) -> bool:
        """Whether nothing was heard for longer than the limit."""
        return now - self._heard_at > self.limit_seconds
