"""How far actions of a pi0.5-shaped policy with NVFP4 MLPs, W4A16 and W4A4, are from BF16's, on random observations.

    python -m benchmarks.models.vla_actions [--size narrow] [--observations 4] [--out FILE]

Builds bundles of examples/vla/pi05.py (random weights; `narrow` has the full model's depth and tokens and an eighth of
its width) for Thor. All parts and all ten denoising steps run in ONNX Runtime on the CPU, plugins by their function
bodies. W4A4 is calibrated on other random observations. Needs no GPU.
"""

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import HERE, command, record
from trt_nvfp4.builder.components.check import cosine
from trt_nvfp4.builder.components.devices.device import numpy_type
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.components.pipeline import Pipeline
from trt_nvfp4.builder.pipeline import parts_build as build
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.common.metrics import relative_error

POLICY = HERE.parent / "examples" / "vla" / "pi05.py"
CALIBRATION_SAMPLES = 2
VOCABULARY = 1000
Observation = dict[str, np.ndarray]


def observation(manifest: Manifest, rng: np.random.Generator) -> Observation:
    """Random pixels, instruction and noise."""
    found: Observation = {}
    for name, port in manifest.given().items():
        shape, dtype = [int(size) for size in port.shape], numpy_type(port)
        if dtype.kind == "i":
            found[name] = rng.integers(0, VOCABULARY, shape)
        else:
            values = rng.random(shape) if name == "pixels" else rng.standard_normal(shape)
            found[name] = values.astype(dtype)
    return found


def actions(folder: Path, observations: list[Observation]) -> list[np.ndarray]:
    with Pipeline(folder) as pipeline:
        return [pipeline.run(each)["action.next_actions"] for each in observations]


def bundle(folder: Path, **options: Any) -> tuple[Path, dict[str, dict[str, int]]]:
    """A bundle, and how many subgraphs of each part became what."""
    report = build.run(Request(POLICY, find_target("thor"), bundle=folder, accuracy_samples=0, **options))
    decisions = {
        name: dict(Counter(str(entry["decision"]) for entry in part.subgraphs)) for name, part in report.parts.items()
    }
    return folder, decisions


def measured(expected: list[np.ndarray], found: list[np.ndarray]) -> Mapping[str, Any]:
    """Errors of each observation's actions."""
    pairs = list(zip(expected, found, strict=True))
    return {
        "relative_errors": [relative_error(found=[b], expected=[a]) for a, b in pairs],
        "cosines": [cosine([a], [b]) for a, b in pairs],
    }


def change(expected: np.ndarray, noise: np.ndarray) -> float:
    """How far denoising moves the noise that it starts from, relative to the actions."""
    return relative_error(found=[noise], expected=[expected])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="narrow")
    parser.add_argument("--observations", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "vla_actions.json")
    given = parser.parse_args()
    os.environ |= {"VLA_SIZE": given.size, "VLA_DTYPE": "bfloat16"}
    rng = np.random.default_rng(given.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        original, _ = bundle(folder / "bf16", precision="bf16")
        manifest = Manifest.load(original)
        observations = [observation(manifest, rng) for _ in range(given.observations)]
        expected = actions(original, observations)
        samples = folder / "samples"
        samples.mkdir()
        for number in range(CALIBRATION_SAMPLES):
            np.savez(samples / f"{number}.npz", **observation(manifest, rng))  # type: ignore[arg-type]
        runs = []
        for name, options in (("W4A16", {}), ("W4A4", {"calib_data": samples})):
            built, decisions = bundle(folder / name, **options)
            run = {"name": name, "decisions": decisions, **measured(expected, actions(built, observations))}
            print(run)
            runs.append(run)
    changes = [change(a, each["actions"]) for a, each in zip(expected, observations, strict=True)]
    environment = {"command": command()}
    result = {"environment": environment, "size": given.size, "target": "thor", "changes": changes, "runs": runs}
    record(given.out, result)


if __name__ == "__main__":
    main()
