"""What can go wrong while a Program is played."""


class DeadlockError(RuntimeError):
    """The run came to rest with ops left: says who waits for what, one line a stream."""

    def __init__(self, at_ps: int, waiting: list[str]) -> None:
        self.at_ps = at_ps
        self.waiting = waiting
        shown = "; ".join(waiting[:8]) + (f"; and {len(waiting) - 8} more" if len(waiting) > 8 else "")
        super().__init__(f"nothing can move any more at {at_ps / 1e12:.9g} s: {shown}")
