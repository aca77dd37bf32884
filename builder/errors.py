"""Failures and the exit codes that say whose they are."""

from __future__ import annotations

from . import backend

USAGE = backend.USAGE
MODEL_AT_FAULT = backend.MODEL_AT_FAULT
UNAVAILABLE = backend.UNAVAILABLE
VERIFICATION_FAILED = backend.VERIFICATION_FAILED
BUILD_FAILED = backend.BUILD_FAILED
INTERRUPTED = backend.INTERRUPTED

DEFECT = 1


class BuilderError(backend.EngineError):
    """One message for the user and the exit code of the command."""


def exit_code(error: BaseException) -> int | None:
    """The exit code of a failure that the user can act on; None for a defect of this program."""
    from trt_nvfp4.calibration.errors import CalibrationError
    from trt_nvfp4.graph_passes.plan import PlanError
    from trt_nvfp4.graph_passes.source import ModelError
    from trt_nvfp4.plugins.toolchain import ToolchainError

    if isinstance(error, backend.EngineError):
        return error.exit_code
    # The model is sound: what came with it is not.
    if isinstance(error, (PlanError, CalibrationError)):
        return USAGE
    if isinstance(error, ModelError):
        return MODEL_AT_FAULT
    if isinstance(error, ToolchainError):
        return UNAVAILABLE
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, OSError):
        return BUILD_FAILED
    return None


def message(error: BaseException) -> str:
    """What is printed: the error's own words; for a full or read-only disk, what to do."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; nothing half-written was left"
    if isinstance(error, OSError):
        return backend.describe(error)
    return str(error)
