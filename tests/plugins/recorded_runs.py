"""Small runs of the plugins whose outputs were recorded on an H200, for the emulator to repeat.

Record again, on a machine with such a GPU: python tests/plugins/recorded_runs.py
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import op_inputs
import torch

from trt_nvfp4.plugins.compile.library import build_library
from trt_nvfp4.plugins.host import PluginHost

FILE = Path(__file__).parent / "recorded_h200.npz"
GENERIC, W4A16 = 1, 2


@dataclass(frozen=True)
class Run:
    """`exact`: fused multiply-adds in a fixed order and nothing approximate, so that every GPU gives the same bits."""

    op: str
    inputs: list[torch.Tensor]
    attributes: dict[str, int | float]
    tactic: int
    exact: bool


def runs() -> dict[str, Run]:
    """The runs by name; inputs are the same on every machine."""
    rng = np.random.default_rng(20261121)
    result = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        quantize = op_inputs.quantize(rng, 21, 80, dtype)
        result[f"quantize-{name}"] = Run("NVFP4Quantize", quantize.inputs, {"add_residual": 1}, GENERIC, True)
        linear = op_inputs.linear(rng, 5, 77, 144, dtype)
        for w4a4 in (0, 1):
            attributes: dict[str, int | float] = {"quantize_activations": w4a4}
            result[f"linear-{name}-w4a4={w4a4}"] = Run("NVFP4Linear", linear.inputs, attributes, GENERIC, True)
        gated = op_inputs.gated_mlp(rng, 3, 48, 80, 33, dtype)
        result[f"gated-mlp-{name}"] = Run("NVFP4GatedMLP", gated.inputs, {"activation": 3}, GENERIC, False)
        layers = op_inputs.persistent_mlp(rng, 2, 3, 64, 48, 64, dtype, gated=1)
        attributes = {"activation": 5, "norm": 1, "residual": 1}
        result[f"persistent-{name}"] = Run("NVFP4PersistentMLP", layers.inputs, attributes, GENERIC, False)
        if dtype != torch.float32:
            decode = op_inputs.linear(rng, 3, 160, 544, dtype)
            result[f"decode-{name}"] = Run("NVFP4Linear", decode.inputs, {}, W4A16, False)
    return result


def outputs(host: PluginHost, run: Run) -> list[torch.Tensor]:
    inputs = [x.cuda() for x in run.inputs]
    with host.session(run.op, inputs, run.attributes, tactic=run.tactic) as session:
        return [y.cpu() for y in session.run(inputs)]


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def digest(tensors: list[torch.Tensor]) -> np.ndarray:
    """SHA-256 of all bytes: tells whether a run is given what it was given when it was recorded."""
    joined = b"".join(as_bytes(tensor).tobytes() for tensor in tensors)
    return np.frombuffer(hashlib.sha256(joined).digest(), np.uint8)


if __name__ == "__main__":
    host = PluginHost(build_library("sm_90a"))
    recorded = {f"{name}/inputs": digest(run.inputs) for name, run in runs().items()}
    for name, run in runs().items():
        for index, tensor in enumerate(outputs(host, run)):
            recorded[f"{name}/{index}"] = as_bytes(tensor)
    np.savez_compressed(FILE, **recorded)
    print(f"{FILE}: {len(recorded)} tensors from {torch.cuda.get_device_name()}")
