"""The errors that stop an emulated launch."""


class EmulatorError(Exception):
    """A kernel did something wrong, or something the emulator does not model.

    The interpreter adds where it happened (kernel, PTX line, CTA, warp) through `at`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.where: str | None = None

    def at(self, where: str) -> "EmulatorError":
        """Name the place once: the innermost one wins."""
        if self.where is None:
            self.where = where
        return self

    def __str__(self) -> str:
        return self.message if self.where is None else f"{self.message}\n  at {self.where}"


class PtxSyntaxError(EmulatorError):
    """The text is not PTX that the parser understands."""


class UnknownInstructionError(EmulatorError):
    """An instruction or modifier that the emulator does not implement."""


class MemoryFault(EmulatorError):  # noqa: N818  the usual word
    """Out of bounds, misaligned, or uninitialised access."""


class ProxyFenceError(EmulatorError):
    """The async proxy met generic-proxy writes that no proxy fence made visible."""


class RaceError(EmulatorError):
    """A warp read shared memory that another warp wrote, with no synchronisation in between."""


class DeadlockError(EmulatorError):
    """No warp of the launch can go on."""
