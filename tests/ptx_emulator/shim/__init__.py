"""CUDA programs without a GPU: compile them, run their host code, and launch their kernels in the emulator.

`Program.compile` turns .cu sources into a host library whose CUDA runtime is `cudart.cpp`; `Gpu` is the device it sees.
"""

from ptx_emulator.shim.runtime import Gpu, LaunchRecord, Program
from ptx_emulator.shim.targets import TARGETS, Target
from ptx_emulator.shim.toolkit import Toolkit, find_toolkit

__all__ = ["TARGETS", "Gpu", "LaunchRecord", "Program", "Target", "Toolkit", "find_toolkit"]
