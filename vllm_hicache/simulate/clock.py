"""Time that stands still unless the driver moves it."""


class Clock:
    """Seconds since the story began."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds
