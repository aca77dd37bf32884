"""What ONNX Runtime's optimizers do to models as sessions here run them: beside a session without any.

    python tests/common/optimizer_sweep.py [--seconds 600] [--part 2/8] [--ours] [MODEL.onnx ...]

tries every level with every set of the optimizers that `cpu_session` disables, and prints which fail, or compute
something else. Without models: the networks of transformers that the tests export, by both exporters of torch, and
their mixtures of experts by one. `--part 2/8` takes the second of every eight, `--ours` the set that is used alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime as ort

sys.path.insert(0, str(Path(__file__).parents[1]))

from onnx_models import moe_zoo, zoo
from trt_nvfp4.builder.inputs.random_inputs import random_samples, vocabulary
from trt_nvfp4.calibration.samples.samples import input_specs
from trt_nvfp4.common.cpu_session import DISABLED, cpu_session

LEVELS = ("ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
Outputs = list[np.ndarray]


def plain(model: Path, level: str = "ORT_DISABLE_ALL", disabled: tuple[str, ...] = ()) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled))


def sample_of(model: Path) -> dict[str, np.ndarray]:
    (sample,) = random_samples(input_specs(model), vocabulary(model), 1, np.random.default_rng(0), {})
    return sample


def worst_error(expected: Outputs, found: Outputs) -> float:
    """The largest |y - x| / |x| of the outputs."""
    pairs = zip(expected, found, strict=True)
    return max(float(np.linalg.norm(np.float64(b) - a) / max(np.linalg.norm(np.float64(a)), 1e-30)) for a, b in pairs)


def ours(model: Path) -> float:
    """The error of the session that is used, against one without optimizers."""
    sample = sample_of(model)
    proto = onnx.load(model, load_external_data=False)
    return worst_error(plain(model).run(None, sample), cpu_session(proto, model.parent).run(None, sample))


def combinations(model: Path) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(level, disabled optimizers, what is wrong), of those where something is."""
    sample = sample_of(model)
    expected = plain(model).run(None, sample)
    for level in LEVELS:
        for count in range(len(DISABLED) + 1):
            for disabled in itertools.combinations(DISABLED, count):
                try:
                    error = worst_error(expected, plain(model, level, disabled).run(None, sample))
                except Exception as failure:  # ONNX Runtime's own
                    yield level, disabled, str(failure)[:160]
                else:
                    if not error < 1e-3:
                        yield level, disabled, f"error {error:.2g}"


def networks() -> list[tuple[ModuleType, str, str]]:
    """(module that builds and exports it, name, exporter)."""
    pairs = itertools.product(zoo.ZOO, ("torchscript", "dynamo"))
    dense = [(zoo, *pair) for pair in pairs if zoo.exportable(*pair)]
    return [*dense, *((moe_zoo, name, moe_zoo.fastest_exporter(name)) for name in moe_zoo.MOE_ZOO)]


def exported(folder: Path, part: int, parts: int) -> Iterator[Path]:
    """The networks of transformers that the tests export: those of a part."""
    for module, name, exporter in networks()[part - 1 :: parts]:
        path = folder / f"{name}-{exporter}.onnx"
        try:
            model, draw = module.build(name)
            module.export(model, draw(0), path, exporter)
        except Exception as failure:  # of torch and transformers, whose other versions have other models
            print(f"{path.name}: not exported: {str(failure)[:160]!r}", flush=True)
        else:
            yield path


def sweep(model: Path, only_ours: bool) -> bool:
    """Print what goes wrong; returns whether sessions as they are run here compute what those without optimizers do."""
    error = ours(model)
    print(f"{model.name}: as run here, error {error:.2g}", flush=True)
    for level, disabled, what in () if only_ours else combinations(model):
        print(f"    {level} without {', '.join(disabled) or 'nothing'}: {what!r}", flush=True)
    return error < 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--part", default="1/1", metavar="K/N")
    parser.add_argument("--ours", action="store_true")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    deadline, results = time.monotonic() + arguments.seconds, []
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models or exported(Path(folder), part, parts):
            if time.monotonic() > deadline:
                print("the time is up")
                break
            results.append(sweep(model, arguments.ours))
    print(f"ONNX Runtime {ort.__version__}: {len(results)} models, {results.count(False)} of them wrong as run here")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
