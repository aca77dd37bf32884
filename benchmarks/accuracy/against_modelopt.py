"""The recipes against NVIDIA's nvidia-modelopt: same models, calibration text and metrics, in one run on the CPU.

    pip install nvidia-modelopt && python -m benchmarks.accuracy.against_modelopt

modelopt's NVFP4 rounding needs a GPU (Triton or CUDA). Its two rounding operators are therefore replaced by Torch ones
with the same arithmetic; everything else, the choice of scales and rounding directions and its calibration loops, is
modelopt's own. Its AWQ scales every linear, by a product at run time; ours scales those whose scales fold into what
precedes them, and costs nothing at run time. Seconds are those of the processor, one thread, from the trained model to
the quantized one, calibration included. Rows that the output already has are kept: an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import modelopt
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization import tensor_quant
from torch import Tensor

from benchmarks.accuracy.subjects import SUBJECTS, Metrics, fold, input_statistics, quantized_activations
from trt_nvfp4.calibration import recipes
from trt_nvfp4.common import nvfp4
from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.plugins.ops import number_formats

RESULTS = Path(__file__).resolve().parents[1] / "results" / "accuracy" / "modelopt.json"

# What -> our recipe, and modelopt's configuration and algorithm.
PAIRS: dict[str, tuple[str, str, Any]] = {
    "max": ("max", "NVFP4_DEFAULT_CFG", "max"),
    "four-over-six": ("four-over-six", "NVFP4_FOUR_OVER_SIX_CFG", None),
    "mse": ("mse", "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", None),
    "local hessian": ("local-hessian", "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG", None),
    "awq": ("max+awq", "NVFP4_AWQ_LITE_CFG", None),
    "gptq": ("max+gptq", "NVFP4_DEFAULT_CFG", "gptq"),
}


def round_on_the_cpu() -> None:
    """Replace modelopt's two GPU-only operators."""

    def dynamic(inputs: Tensor, block_size: int, amax: Tensor, *_: int) -> Tensor:
        scale = number_formats.tensor_scale(amax.amax())
        codes, scales = number_formats.quantize_blocks(inputs, scale)
        return number_formats.dequantize_blocks(codes, scales, scale).to(inputs.dtype)

    def static(
        x: Tensor,
        amax: Tensor,
        global_amax: Tensor | None = None,
        quantize_block_scales: bool = True,
        largest: float = number_formats.E4M3_MAX,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        scales = amax.float().reshape(*x.shape[:-1], 1) / number_formats.E2M1_MAX
        if quantize_block_scales:
            whole = amax.amax() if global_amax is None else global_amax
            tensor_scale = whole.float() / (number_formats.E2M1_MAX * largest)
            scales = number_formats.e4m3_round(scales / tensor_scale).float() * tensor_scale
        codes = number_formats.e2m1_encode(torch.where(scales > 0, x.float() / scales, 0.0))
        return (number_formats.e2m1_decode(codes) * scales).to(dtype or x.dtype)

    tensor_quant.dynamic_block_quantize_op = dynamic
    tensor_quant.triton_kernel = SimpleNamespace(IS_AVAILABLE=True, static_blockwise_fp4_fake_quant=static)


def ours(name: str, spelling: str) -> dict[str, Any]:
    recipe = recipes.parse(spelling)
    subject = SUBJECTS[name]()
    started = time.process_time()
    statistics = fold(subject, recipe, input_statistics(subject, recipe.needs))
    for site in subject.sites:
        site.set_weight(nvfp4.dequantize(*recipes.quantize_weight(site.weight, recipe, statistics[site.name])))
    seconds = time.process_time() - started
    w4a16 = subject.evaluate()
    with quantized_activations(subject, statistics):
        return {"W4A16": w4a16, "W4A4": subject.evaluate(), "seconds": seconds}


def modelopts(name: str, configuration: str, algorithm: str | None) -> dict[str, Any]:
    config = copy.deepcopy(getattr(mtq, configuration))
    # Linears alone, as ours.
    config["quant_cfg"].append({"quantizer_name": "*", "parent_class": "nn.LayerNorm", "enable": False})
    if algorithm is not None:
        config["algorithm"] = algorithm
    subject = SUBJECTS[name]()
    started = time.process_time()
    mtq.quantize(subject.model, config, lambda _: subject.calibrate())
    seconds = time.process_time() - started
    w4a4 = subject.evaluate()
    mtq.disable_quantizer(subject.model, "*input_quantizer")
    return {"W4A16": subject.evaluate(), "W4A4": w4a4, "seconds": seconds}


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A recipe that one side lacks here is recorded with its reason."""
    try:
        return measure()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--recipes", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    round_on_the_cpu()
    results: dict[str, Any] = {
        "modelopt": modelopt.__version__,
        "torch": torch.__version__,
        "originals": {},
        "rows": [],
    }
    if arguments.output.exists():
        recorded = json.loads(arguments.output.read_text())
        if recorded["modelopt"] == modelopt.__version__:
            results["originals"], results["rows"] = recorded["originals"], recorded["rows"]
    known = {(row["subject"], row["recipe"]) for row in results["rows"]}
    for name in arguments.subjects:
        original: Metrics = SUBJECTS[name]().evaluate()
        results["originals"][name] = original
        for what in arguments.recipes:
            if (name, what) in known:
                continue
            spelling, configuration, algorithm = PAIRS[what]
            row = {
                "subject": name,
                "recipe": what,
                "ours": attempt(lambda name=name, spelling=spelling: ours(name, spelling)),
                "modelopt": attempt(lambda name=name, c=configuration, a=algorithm: modelopts(name, c, a)),
            }
            results["rows"].append(row)
            print(json.dumps(row), flush=True)
            with replacing(arguments.output) as partial:
                partial.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
