"""How a run is followed."""

from typing import Protocol


class Progress(Protocol):
    """Follows a run: a stage begins; some of its steps are done (of `total`, 0 where that is unknown)."""

    def stage(self, text: str) -> None: ...

    def step(self, done: int, total: int, text: str = "") -> None: ...


class Silent:
    """For runs that nobody follows."""

    def stage(self, text: str) -> None:
        pass

    def step(self, done: int, total: int, text: str = "") -> None:
        pass


class Named:
    """Progress of one of several runs."""

    def __init__(self, inner: Progress, name: str) -> None:
        self._inner, self._name = inner, name

    def stage(self, text: str) -> None:
        self._inner.stage(f"{self._name}: {text}")

    def step(self, done: int, total: int, text: str = "") -> None:
        self._inner.step(done, total, text)
