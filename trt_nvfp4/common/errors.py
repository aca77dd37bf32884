"""The exception of calibration for inputs at fault."""

from trt_nvfp4.errors import TrtNvfp4Error


class CalibrationError(TrtNvfp4Error, ValueError):
    """Samples, statistics or checkpoint tensors are not what the model or the format needs."""

    exit_code = 2
