"""Run a CUDA program's `main`, its kernels in the emulator: python -m ptx_emulator.shim b200 program.cu -- --m=256"""

import argparse
import ctypes
import sys
from dataclasses import replace
from pathlib import Path

from ptx_emulator.device import TOLERABLE
from ptx_emulator.errors import EmulatorError
from ptx_emulator.shim import TARGETS, Gpu, Program
from ptx_emulator.shim.toolkit import cutlass_includes, example_includes


def main() -> int:
    """Returns the program's exit status, 1 if the emulator stopped a kernel. Launches are listed on stderr."""
    parser = argparse.ArgumentParser(prog="python -m ptx_emulator.shim", description=__doc__)
    parser.add_argument("target", choices=TARGETS, help="the GPU the program sees")
    parser.add_argument("source", type=Path, nargs="+", help="CUDA and C++ files of one program")
    parser.add_argument("--flag", action="append", default=[], help="for nvcc, for example --flag=-DNAME=1; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="draws the order in which asynchronous operations finish")
    parser.add_argument("--sms", type=int, help="the SMs that it has, if not all of the GPU's")
    parser.add_argument("--lenient-exit", action="store_true", help="allow kernels to end with copies in flight")
    parser.add_argument("--disorder", type=float, default=0.0, help="share of waits, peeks and stores to disturb")
    parser.add_argument("--tolerate", action="append", default=[], choices=TOLERABLE, help="not an error; repeatable")
    parser.add_argument("--cutlass", action="store_true", help="add the nvidia-cutlass package's include directories")
    own, program_arguments = sys.argv[1:], []
    if "--" in own:
        split = own.index("--")
        own, program_arguments = own[:split], own[split + 1 :]
    arguments = parser.parse_args(own)

    target = TARGETS[arguments.target]
    gpu = Gpu(
        replace(target, sm_count=arguments.sms or target.sm_count),
        seed=arguments.seed,
        strict_exit=not arguments.lenient_exit,
        on_error=lambda error: print(error, file=sys.stderr, flush=True),
    )
    gpu.device.tolerated, gpu.device.disorder = frozenset(arguments.tolerate), arguments.disorder
    includes = [*cutlass_includes(), *example_includes()] if arguments.cutlass else []
    program = Program.compile(arguments.source, gpu, flags=arguments.flag, includes=includes)
    argv = [str(arguments.source[0]).encode(), *(a.encode() for a in program_arguments)]
    try:
        return program.call("main", len(argv), (ctypes.c_char_p * (len(argv) + 1))(*argv, None))
    except EmulatorError:
        return 1  # already reported
    finally:
        for launch in gpu.launches:
            print(
                f"{launch.kernel[:60]} grid {launch.grid} block {launch.block} cluster {launch.cluster}",
                file=sys.stderr,
            )


if __name__ == "__main__":
    sys.exit(main())
