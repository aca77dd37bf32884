"""Float32 networks computed in 16 bits, ours beside converters of others: errors, kernels, products left in float32.

    python -m benchmarks.accuracy.mixed_precision [--networks bert ...] [--out FILE]

Needs `pip install '.[benchmarks]' onnxconverter-common onnxslim lief`; no GPU: TensorRT-RTX builds the engines for RTX
Blackwell. What the output has already is kept. Errors are |y - y32| / |y32| over the outputs of fresh inputs; nodes'
results are rounded as on a GPU.
"""

import argparse
import importlib.metadata
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

import trt_nvfp4
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.calibration.samples.samples import input_specs, load_samples
from trt_nvfp4.calibration.statistics.collection import observable
from trt_nvfp4.calibration.statistics.statistics import collect
from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.graph_passes.ir.save import write
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.mixed_precision.choose import choose, observed_tensors
from trt_nvfp4.graph_passes.mixed_precision.convert import convert

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "results" / "accuracy" / "mixed_precision.json"
sys.path.insert(0, str(HERE.parent / "tests"))
from onnx_models.float32_networks import NETWORKS, Float32Network, exporters, network  # noqa: E402

TARGET = "rtx-blackwell"
CALIBRATION, FRESH = 6, 4
Converter = Callable[[Path, Path, Path], None]
Outputs = list[np.ndarray]


def autocast(dtype: str) -> Converter:
    """modelopt's, with the samples as calibration data."""

    def run(model: Path, samples: Path, out: Path) -> None:
        from modelopt.onnx.autocast import convert_to_mixed_precision

        data = str(next(samples.glob("*.npz")))
        made = convert_to_mixed_precision(str(model), dtype, keep_io_types=True, calibration_data=data)
        onnx.save(made, out)

    return run


def onnxruntime_float16(model: Path, samples: Path, out: Path) -> None:
    """ONNX Runtime's."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(str(model), keep_io_types=True), out)


def common_float16(model: Path, samples: Path, out: Path) -> None:
    """onnxconverter-common's."""
    from onnxconverter_common.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(model), keep_io_types=True), out)


def own(dtype: str) -> Converter:
    """Ours; FP16 looks at the samples for what leaves its range, as build-engine does."""

    def run(model: Path, samples: Path, out: Path) -> None:
        source = load(model)
        names = observable(model, observed_tensors(source)) if dtype == "fp16" else []
        data = load_samples(samples, input_specs(model))
        ranges = collect(model, dict.fromkeys(names, ()), data).amax if names else {}
        write(convert(source, choose(source, dtype, ranges=ranges)).ir_model, out)

    return run


CONVERTERS: dict[str, Converter] = {
    "ours, BF16": own("bf16"),
    "AutoCast, BF16": autocast("bf16"),
    "ours, FP16": own("fp16"),
    "AutoCast, FP16": autocast("fp16"),
    "ONNX Runtime, FP16": onnxruntime_float16,
    "onnxconverter-common, FP16": common_float16,
}


def relative_error(found: Outputs, expected: Outputs) -> float:
    """Over all outputs together."""
    difference = sum(float(np.square(x - y).sum()) for x, y in zip(found, expected, strict=True))
    if not np.isfinite(difference):
        return float("inf")
    return float(np.sqrt(difference / sum(float(np.square(y).sum()) for y in expected)))


def torch_outputs(subject: Float32Network, dtype: torch.dtype) -> Outputs:
    """For fresh inputs."""
    return [subject.run(subject.draw(seed), dtype).numpy() for seed in range(FRESH)]


def onnx_outputs(subject: Float32Network, model: Path) -> Outputs:
    """The same inputs by ONNX Runtime, BF16 results rounded."""
    running = session(model, rounding=True)
    feeds = ({name: value.numpy() for name, value in subject.draw(seed).items()} for seed in range(FRESH))
    return [np.asarray(running.run(None, feed)[0]) for feed in feeds]


def built(model: Path, folder: Path, **options: Any) -> dict[str, Any]:
    """What build-engine makes of `model`, or why it makes nothing."""
    try:
        result = trt_nvfp4.build(model, target=TARGET, output=folder / "out.engine", **options)
    except trt_nvfp4.TrtNvfp4Error as error:
        return {"failed": str(error).replace(str(folder), "")[:600]}
    replaced = [entry for entry in result.subgraphs if entry["decision"] != "keep"]
    return {
        "kernels": dict(Counter(entry["kernels"] for entry in replaced)),
        "plugin_layers": result.report.plugin_layers,
        "network": result.report.network,
    }


def measure_converter(subject: Float32Network, run: Converter, model: Path, folder: Path, expected: Outputs) -> Any:
    """One row: seconds, error, Casts, subgraphs and float32 products of the engine; or what failed."""
    out, samples = folder / "converted.onnx", folder / "samples"
    started = time.process_time()
    try:
        run(model, samples, out)
    except Exception as error:  # theirs
        return {"failed": f"converter: {type(error).__name__}: {error}"[:600]}
    row: dict[str, Any] = {"seconds": round(time.process_time() - started, 2)}
    proto = onnx.load(out, load_external_data=False)
    row["opset"] = proto.opset_import[0].version
    row["casts"] = sum(node.op_type == "Cast" for node in proto.graph.node)
    try:
        row["error"] = relative_error(onnx_outputs(subject, out), expected)
    except Exception as error:  # ONNX Runtime's
        row["failed"] = f"ONNX Runtime: {error}".replace(str(folder), "")[:600]
        return row
    if not np.isfinite(row["error"]):
        return row | {"error": None, "failed": "infinite outputs"}
    return row | {"engine": built(out, folder, precision="bf16")}


def measure(subject: Float32Network, exporter: str, known: dict[str, Any], save: Callable[[], None]) -> None:
    """Adds what `known` lacks of this network."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, samples = folder / "model.onnx", folder / "samples"
        subject.export(model, exporter)
        samples.mkdir()
        for number in range(CALIBRATION):
            inputs = subject.draw(1000 + number)
            np.savez(samples / f"{number}.npz", **{name: value.numpy() for name, value in inputs.items()})
        expected = torch_outputs(subject, torch.float32)
        known["float32 export"] = relative_error(onnx_outputs(subject, model), expected)
        known["Torch, BF16"] = relative_error(torch_outputs(subject, torch.bfloat16), expected)
        known["Torch, FP16"] = relative_error(torch_outputs(subject, torch.float16), expected)
        if "nvfp4" not in known:
            found = built(model, folder, calib_data=samples, require="nvfp4", require_fast=True)
            if "failed" not in found:
                found["error"] = relative_error(onnx_outputs(subject, folder / "out.rewritten.onnx"), expected)
            known["nvfp4"] = found
            save()
        rows = known.setdefault("converters", {})
        for name, run in CONVERTERS.items():
            if name not in rows:
                rows[name] = measure_converter(subject, run, model, folder, expected)
                save()


def versions() -> Mapping[str, str]:
    """Of what is compared."""
    packages = ("onnx", "onnxruntime", "torch", "nvidia-modelopt", "onnxconverter-common", "tensorrt-rtx")
    return {package: importlib.metadata.version(package) for package in packages}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=NETWORKS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out: Path = arguments.out
    record = json.loads(out.read_text()) if out.exists() else {"networks": {}}
    record["versions"] = versions()

    def save() -> None:
        with replacing(out) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n")

    for name in arguments.networks:
        subject = network(name)
        for exporter in exporters(name):
            measure(subject, exporter, record["networks"].setdefault(f"{name}, {exporter}", {}), save)
            save()
            print(name, exporter, flush=True)


if __name__ == "__main__":
    main()
