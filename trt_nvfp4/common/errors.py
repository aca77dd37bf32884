"""What calibration raises when its inputs are at fault."""

from __future__ import annotations


class CalibrationError(ValueError):
    """Samples, statistics or checkpoint tensors are not what the model or the format needs."""
