"""How many tokens of a prompt a step takes beside sequences that wait for their next token."""

# A step with a piece of a prompt may take so many times a step without, and more so where more prompts than texts wait.
_SLOWDOWN = 2.0
# The share of each new time in the mean.
_NEWEST = 0.2
# Times of wider steps shrink by this factor with every step, so that a width that was slow once is tried again.
_FADES = 0.999


class Pace:
    """Keeps the times of steps by their width, which is a power of two."""

    def __init__(self, widest: int) -> None:
        """`widest`: most tokens of a row in a step."""
        self.widths = [1 << power for power in range(widest.bit_length())]
        self._seconds: dict[int, float] = {}

    def learn(self, width: int, seconds: float) -> None:
        """Take in how long a step took."""
        if width not in self.widths:
            return
        before = self._seconds.get(width, seconds)
        self._seconds[width] = before + _NEWEST * (seconds - before)
        for wider in self.widths[self.widths.index(width) + 1 :]:
            if wider in self._seconds:
                self._seconds[wider] *= _FADES

    def width(self, waiting: int, prompts: int) -> int:
        """The widest step if no sequence waits for a token, else the widest within the bound. `waiting`: sequences that
        wait for their next token; `prompts`: those that wait for their first."""
        if not waiting:
            return self.widths[-1]
        limit = _SLOWDOWN * max(1.0, prompts / waiting) * self._seconds.get(1, 0.0)
        return max((width for width in self.widths if self._seconds.get(width, 0.0) <= limit), default=1)
