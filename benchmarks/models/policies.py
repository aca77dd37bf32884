"""Robot policies of LeRobot against LeRobot's own chunk of actions for the same observation and noise.

    build-engine DIR --bundle FOLDER --target thor     # for each policy, with LeRobot installed
    python -m benchmarks.models.policies FOLDER... [--out FILE]

Collects what the builds reported: the relative error of the exported chain (float32), that of the rewritten one (BF16
and NVFP4 MLPs; ONNX Runtime, plugins by their bodies), and each joint's largest error in the robot's units.
"""

import argparse
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.harness import HERE, command, record
from trt_nvfp4.builder.components.manifest import Manifest
from trt_nvfp4.builder.components.policies.processing import POLICY
from trt_nvfp4.common.json_text import read_json


def reported(folder: Path) -> dict[str, Any]:
    """The errors of one build, and what was built."""
    report, manifest = read_json(folder / "components.report.json"), Manifest.load(folder)
    loop = manifest.parts[-1].loop
    subgraphs = [entry for part in report["parts"].values() for entry in part["subgraphs"]]
    return {
        "type": manifest.settings[POLICY]["type"],
        "target": report["target"],
        "steps": 1 if loop is None else loop.times,
        "nvfp4": sum(entry["decision"] != "keep" for entry in subgraphs),
        **report["chain"],
        "joints": report["joints"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "policies.json")
    arguments = parser.parse_args()
    versions = {name: metadata.version(name) for name in ("lerobot", "torch", "transformers", "onnxruntime")}
    runs = [reported(folder) for folder in arguments.folder]
    record(arguments.out, {"command": command(), "versions": versions, "runs": runs})


if __name__ == "__main__":
    main()
