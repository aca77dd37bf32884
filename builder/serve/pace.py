"""How many tokens of prompts go between two steps of the texts that wait for their next token."""

# Pieces of prompts may take twice as long as a step, so that a text waits three steps' time for a token, and longer
# where more prompts than texts wait. Narrower ones cost more: a row by itself hardly takes less than a step.
_SLOWDOWN = 2.0
# The share of each new time in the mean.
_NEWEST = 0.2
# Times of wider pieces shrink by this factor with every piece, so that a width that was slow once is tried again.
_FADES = 0.999


class Pace:
    """Keeps the times of pieces by their width, which is a power of two, and of steps."""

    def __init__(self, widest: int) -> None:
        """`widest`: most tokens of a piece."""
        self.widths = [1 << power for power in range(widest.bit_length())]
        self._seconds: dict[int, float] = {}
        self._step = 0.0
        # Seconds that pieces may still take before the next step, and whether one was taken.
        self._left, self._taken = 0.0, False

    def learn_step(self, seconds: float, waiting: int, prompts: int) -> None:
        """Take in how long a step took; `waiting` texts took it, and `prompts` wait for their first token."""
        self._step += (_NEWEST if self._step else 1.0) * (seconds - self._step)
        self._left, self._taken = _SLOWDOWN * self._step * max(1.0, prompts / waiting), False

    def learn_piece(self, width: int, seconds: float) -> None:
        """Take in how long a piece took."""
        self._left, self._taken = self._left - seconds, True
        if width not in self.widths:
            return
        before = self._seconds.get(width, seconds)
        self._seconds[width] = before + _NEWEST * (seconds - before)
        for wider in self.widths[self.widths.index(width) + 1 :]:
            if wider in self._seconds:
                self._seconds[wider] *= _FADES

    def width(self) -> int:
        """The widest piece that still fits before the next step; 0 for none. One piece goes before each step."""
        fitting = [width for width in self.widths if self._seconds.get(width, 0.0) <= self._left]
        return max(fitting, default=0 if self._taken else 1)
