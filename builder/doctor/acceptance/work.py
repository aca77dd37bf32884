"""One step of the acceptance run, in a process of its own: `python -m trt_nvfp4.builder.doctor.acceptance.work`."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from trt_nvfp4.builder.doctor.acceptance.models import MODELS, SIZES, WIDTH
from trt_nvfp4.builder.doctor.acceptance.steps import VARIANTS, Outcome, State, Variant, steps
from trt_nvfp4.builder.errors import VerificationError, exit_code, first_line, message
from trt_nvfp4.builder.generate.open import RunnerName
from trt_nvfp4.builder.targets import find_target
from trt_nvfp4.builder.terminal.progress import Silent
from trt_nvfp4.calibration.samples.samples import save_sample
from trt_nvfp4.common.replacing import replacing

Numbers = dict[str, float]

#: Plugins and engines against ONNX Runtime, which runs the same rewritten model: only rounding to 16 bits differs.
LEAST_SQNR_DB = 30.0
LARGEST_KL = 0.01
LEAST_EQUAL_TOKENS = 0.9
DECODED = 8
ROWS = (1, 5, 64)


def build(variant: Variant, folder: Path, target: str) -> Numbers:
    """Make the model and build its engine, which verifies that every planned layer is there; on a machine that cannot
    build for the target, plan and rewrite only."""
    from trt_nvfp4.builder.pipeline.pipeline import run
    from trt_nvfp4.builder.pipeline.request import Request

    folder.mkdir(parents=True, exist_ok=True)
    options = dict(variant.options)
    if "calib_data" in options:
        options["calib_data"] = _samples(variant, folder)
    builds = _builds(target)
    model = MODELS[variant.model](folder)
    report = run(
        Request(model, target=target, output=_engine(folder), stop_after=None if builds else "rewrite", **options)
    )
    replaced = sum(entry["decision"] != "keep" for entry in report.subgraphs)
    if not replaced:
        raise VerificationError("no subgraph was replaced")
    size = {"engine bytes": float(_engine(folder).stat().st_size)} if builds else {}
    return {"subgraphs": len(report.subgraphs), "replaced": replaced, **size}


def plugins(variant: Variant, folder: Path, target: str) -> Numbers:
    """Run the rewritten model with Torch and the plugins on the GPU, and compare with ONNX Runtime."""
    model = _rewritten(_engine(folder))
    if variant.is_decoder:
        return _decoded(model, model, "torch")
    import torch

    from trt_nvfp4.builder.generate.torch_graph.graph import Graph
    from trt_nvfp4.builder.generate.torch_graph.program import Program
    from trt_nvfp4.builder.generate.torch_runner import has_gpu, plugins_of

    device = torch.device("cuda" if has_gpu() else "cpu")
    graph = Graph(model, device)
    program = Program(graph, plugins_of(graph, device.type == "cuda", None))

    def on_gpu(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {name: torch.from_numpy(value).to(device) for name, value in inputs.items()}
        return {name: tensor.float().cpu().numpy() for name, tensor in program.run(given).items()}

    return _agreement(model, on_gpu)


def engine(variant: Variant, folder: Path, target: str) -> Numbers:
    """Run the engine with TensorRT, and compare with ONNX Runtime. Decoders run two prompts over several steps."""
    from trt_nvfp4.builder.accuracy.runners import run

    built = _engine(folder)
    model = _rewritten(built)
    return (
        _decoded(model, built, "auto") if variant.is_decoder else _agreement(model, lambda inputs: run(built, inputs))
    )


def bench(variant: Variant, folder: Path, target: str) -> Numbers:
    """Time the engine beside TensorRT's own FP8, NVFP4 and BF16; numbers in microseconds."""
    from trt_nvfp4.builder.bench.bench import bench as measure
    from trt_nvfp4.builder.bench.subject import Request

    found = measure(Request(_engine(folder), mode="engine", rounds=20), Silent())
    return {f"{name} us": times["median_us"] for name, times in found.contestants.items() if "median_us" in times}


def pair(variant: Variant, folder: Path, target: str) -> Numbers:
    """Run two engines at the same time in this process: each has a plugin library of its own."""
    from trt_nvfp4.builder.accuracy.runners import ModelRunner, infer

    engines = [_engine(folder.parent / other.key) for other in VARIANTS[:2]]
    runners = [ModelRunner.of(path) for path in engines]
    with runners[0].runner(()) as first, runners[1].runner(()) as second:
        numbers: Numbers = {}
        for path, side, runner in zip(engines, runners, (first, second), strict=True):
            found = _agreement(_rewritten(path), partial(infer, side, runner))
            numbers |= {f"{path.parent.name}: {name}": value for name, value in found.items()}
        return numbers


def _builds(target: str) -> bool:
    return find_target(target).unsupported_here() is None


STAGES: dict[str, Callable[[Variant, Path, str], Numbers]] = {
    "build": build,
    "plugins": plugins,
    "engine": engine,
    "bench": bench,
    "pair": pair,
}


def _engine(folder: Path) -> Path:
    return folder / "model.engine"


def _rewritten(engine: Path) -> Path:
    return engine.with_suffix(".rewritten.onnx")


def _samples(variant: Variant, folder: Path) -> Path:
    rng = np.random.default_rng(2)
    given: dict[str, np.ndarray]
    if variant.is_decoder:
        # A prompt of 64 tokens, and caches that are still empty.
        cache = np.zeros(
            (1, SIZES["num_key_value_heads"], SIZES["max_position_embeddings"], SIZES["head_dim"]), np.float16
        )
        given = {f"past_key_values.{layer}.{part}": cache for layer in (0, 1) for part in ("key", "value")}
        given |= {"past_length": np.zeros(1, np.int64), "new_length": np.full(1, 64)}
        given["input_ids"] = rng.integers(0, SIZES["vocab_size"], (1, 64))
    else:
        given = {"x": rng.standard_normal((64, WIDTH)).astype(np.float16)}
    return save_sample(folder / "samples.npz", given)


def _agreement(model: Path, run: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> Numbers:
    """SQNR of `run` against ONNX Runtime over several numbers of rows. Raises BuilderError (verification)."""
    from trt_nvfp4.builder.accuracy.runners import run as run_file

    rng = np.random.default_rng(3)
    worst = np.inf
    for rows in ROWS:
        inputs = {"x": rng.standard_normal((rows, WIDTH)).astype(np.float16)}
        expected = run_file(model, inputs)["y"].astype(np.float64)
        found = np.asarray(run(inputs)["y"]).astype(np.float64)
        if found.shape != expected.shape or not np.isfinite(found).all():
            raise VerificationError(f"{rows} rows: the output holds NaN, Inf or another shape")
        worst = min(worst, 10 * np.log10((expected**2).sum() / max(((found - expected) ** 2).sum(), 1e-30)))
    if worst < LEAST_SQNR_DB:
        raise VerificationError(f"SQNR {worst:.1f} dB against ONNX Runtime, expected {LEAST_SQNR_DB:.0f}")
    return {"SQNR dB": round(float(worst), 1)}


def _decoded(reference: Path, result: Path, runner: RunnerName) -> Numbers:
    """KL divergence and equal tokens over prompts of unequal length and several steps. Raises BuilderError
    (verification)."""
    from trt_nvfp4.builder.accuracy.decoding import compare_decoding

    found = compare_decoding(reference, result, DECODED, runner=runner)
    if found.kl > LARGEST_KL or found.top1 < LEAST_EQUAL_TOKENS:
        raise VerificationError(
            f"KL {found.kl:.4f} and {found.top1:.0%} equal tokens over {DECODED} steps, expected at most {LARGEST_KL} "
            f"and at least {LEAST_EQUAL_TOKENS:.0%}"
        )
    return {"KL": round(found.kl, 5), "equal tokens": round(found.top1, 3)}


def main(key: str, folder: Path, target: str) -> int:
    """Take the step `key`; its outcome is folder/KEY.json."""
    step = next(step for step in steps(_builds(target)) if step.key == key)
    started = time.monotonic()
    state: State = "passed"
    detail, numbers = "", {}
    try:
        numbers = STAGES[step.stage](step.variant, folder / step.variant.key, target)
    except Exception as error:
        traceback.print_exc()
        state, detail = "failed", message(error) if exit_code(error) is not None else first_line(error)
    outcome = Outcome(step.variant.name, step.title, state, detail, round(time.monotonic() - started, 1), numbers)
    with replacing(folder / f"{key}.json") as temporary:
        temporary.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
