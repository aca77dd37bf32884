"""The program of a bundle's run_policy.py: observations in, actions out, on the device's GPU.

Needs TensorRT's (or TensorRT-RTX's) package, NumPy and cuda-bindings; for a task as text, transformers too.

Exit codes: 0 done, 2 usage, 3 the bundle, its engines or the observations are at fault, 4 a package or the GPU is
missing, 6 the engine failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from trt_nvfp4.builder.components.chain import run_whole
from trt_nvfp4.builder.components.devices.tensorrt_device import open_engines
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.components.policies.policy import Policy
from trt_nvfp4.builder.errors import ModelFaultError, UsageError, exit_code, message, printable
from trt_nvfp4.builder.generate.tokenizer import Tokenizer
from trt_nvfp4.builder.model.decoder_contract import TOKENIZER
from trt_nvfp4.common.json_text import read_npz


def main(folder: Path) -> int:
    """Run the policy in `folder` on the observations that are named; returns the exit code."""
    arguments = _parser().parse_args()
    try:
        manifest = Manifest.load(folder)
        observations = [_observation(file, arguments) for file in arguments.observation]
        files = {part.name: folder / part.name / "model.engine" for part in manifest.parts}
        if missing := [file for file in files.values() if not file.is_file()]:
            raise ModelFaultError(f"{missing[0]}: no such engine; run build_engine.py first")
        device = open_engines(folder, manifest, files)
        tokenizer = cache(lambda: Tokenizer(folder / TOKENIZER))  # loaded for the first text
        policy = Policy(
            manifest,
            lambda inputs: run_whole(device, manifest, inputs),
            lambda text: tokenizer().encode(text),
            arguments.seed,
        )
        actions = []
        for observation in observations:
            begun = time.perf_counter()
            actions.append(policy.select_action(observation))
            took = (time.perf_counter() - begun) * 1e3
            print(" ".join(f"{number:.6g}" for number in actions[-1]), f"({took:.1f} ms)")
        if arguments.output is not None:
            np.save(arguments.output, np.stack(actions))
        return 0
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(error)
        if code is None:
            raise
        print(f"error: {printable(message(error))}", file=sys.stderr)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run the policy of this bundle: one action for each observation.")
    parser.add_argument(
        "observation",
        nargs="+",
        type=Path,
        metavar="FILE.npz",
        help="arrays by LeRobot's names: observation.images.* uint8 [height, width, 3], observation.state [joints]",
    )
    parser.add_argument("--task", metavar="TEXT", help="what to do; needs transformers")
    parser.add_argument("--task-ids", metavar="1,2,3", help="the same as token ids")
    parser.add_argument("--seed", type=int, help="of the noise that actions begin as")
    parser.add_argument("--output", type=Path, metavar="FILE.npy", help="the actions [observations, joints]")
    return parser


def _observation(file: Path, arguments: argparse.Namespace) -> Mapping[str, Any]:
    try:
        found: dict[str, Any] = {**read_npz(file)}
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: not a readable .npz file ({error}); write it with numpy.savez") from error
    if arguments.task_ids is not None:
        try:
            found["task"] = [int(token) for token in arguments.task_ids.split(",")]
        except ValueError:
            raise UsageError(f"--task-ids {arguments.task_ids}: expected token ids such as 1,2,3") from None
    elif arguments.task is not None:
        found["task"] = arguments.task
    return found
