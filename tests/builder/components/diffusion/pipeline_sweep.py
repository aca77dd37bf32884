"""Every family of small pipelines as engines for RTX Blackwell: what is planned in NVFP4, and the pictures.

    python -m tests.builder.components.diffusion.pipeline_sweep [--out RECORD.json] [FAMILY ...]

Each family is rewritten in BF16, and built in NVFP4, calibrated on two prompts; its engines are verified. The rewritten
parts in ONNX Runtime make a picture of another prompt and seed, compared with diffusers' in float32.
RECORD.json keeps what earlier runs found. Not a test: it takes minutes for a family.
"""

import argparse
import json
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import trt_nvfp4.diffusers
from benchmarks.harness import HERE, record
from tests.builder.components.diffusion.pipelines import FAMILIES, saved
from tests.builder.components.diffusion.test_pipelines import picture
from trt_nvfp4.builder.components.diffusion.directory import open_pipeline
from trt_nvfp4.builder.pipeline import parts_build
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.common.metrics import cosine, psnr

#: What the names of layers within blocks hold; Z-Image's are called layers and refiners.
BLOCKS = ("block", "layers.", "refiner.")
#: Families are recorded one by one.
COMMAND = "python -m tests.builder.components.diffusion.pipeline_sweep"
PROMPTS = "a red chair\nrain over the sea\n"


def weights(entry: Any) -> int:
    """Weights of a reported subgraph."""
    shapes = entry["shapes"]
    middle = shapes.get("intermediate_features")
    if middle is None:
        return int(shapes["in_features"] * shapes["out_features"])
    return int(middle * ((1 + (entry["kind"] == "gated_mlp")) * shapes["in_features"] + shapes["out_features"]))


def built(name: str, model: Path, **options: Any) -> dict[str, Any]:
    """The build's report, shortened, and the pipeline's picture by its parts."""
    _, size, arguments = FAMILIES[name]
    target = find_target("rtx-blackwell")
    request = Request(model, target, image_size=size, pipeline_arguments=arguments, accuracy_samples=0, **options)
    report = parts_build.run(request)
    expected = picture(open_pipeline(model), name)
    found = picture(trt_nvfp4.diffusers.load(model, request.base, runner="onnxruntime"), name)
    part = next(part for key, part in report.parts.items() if key in ("transformer", "unet"))
    of_blocks = [entry for entry in part.subgraphs if any(name in entry["name"] for name in BLOCKS)]
    total = sum(map(weights, of_blocks))
    decisions = Counter({each["decision"]: 0 for each in of_blocks})
    for entry in of_blocks:
        decisions[entry["decision"]] += weights(entry)
    return {
        "parts": {key: bool(each.engine) for key, each in report.parts.items()},
        "block_weights": {decision: round(count / total, 4) for decision, count in decisions.items()},
        "cosine": round(cosine(found, expected), 5),
        "psnr_db": round(psnr(found=found, expected=expected), 2),
    }


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("diffusers", "transformers", "torch", "tensorrt-rtx", "onnxruntime")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "diffusion.json")
    arguments = parser.parse_args()
    found = json.loads(arguments.out.read_text())["families"] if arguments.out.exists() else {}
    for name in arguments.families:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "prompts.txt").write_text(PROMPTS)
            saved(name, folder / name)
            found[name] = {
                "bf16": built(name, folder / name, bundle=folder / "bf16", precision="bf16"),
                "nvfp4": built(name, folder / name, output=folder / "nvfp4", calib_data=folder / "prompts.txt"),
            }
        print(name, json.dumps(found[name]), flush=True)
        record(arguments.out, {"environment": {"command": COMMAND, **versions()}, "families": found})


if __name__ == "__main__":
    main()
