"""nvidia-modelopt. Its NVFP4 rounding needs a GPU (Triton or CUDA): its two rounding operators are replaced by Torch
ones with the same arithmetic. Everything else, the choice of scales and rounding directions and its calibration loops,
is its own. Its AWQ scales every linear, by a product at run time; ours scales those whose scales fold into what
precedes them, and costs nothing at run time.
"""

import copy
from types import SimpleNamespace

import modelopt
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization import tensor_quant
from torch import Tensor

from benchmarks.accuracy.libraries.library import Library
from benchmarks.accuracy.subjects import Subject
from trt_nvfp4.plugins.ops import number_formats

# Configuration, and algorithm where it is not the configuration's.
RECIPES = {
    "max": ("max", ("NVFP4_DEFAULT_CFG", "max")),
    "four-over-six": ("four-over-six", ("NVFP4_FOUR_OVER_SIX_CFG", None)),
    "mse": ("mse", ("NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", None)),
    "local hessian": ("local-hessian", ("NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG", None)),
    "awq": ("max+awq", ("NVFP4_AWQ_LITE_CFG", None)),
    "gptq": ("max+gptq", ("NVFP4_DEFAULT_CFG", "gptq")),
}


def library() -> Library:
    """modelopt, its rounding replaced."""
    _round_on_the_cpu()
    return Library(
        "modelopt",
        modelopt.__version__,
        RECIPES,
        _quantize,
        lambda subject: mtq.disable_quantizer(subject.model, "*input_quantizer"),
    )


def _quantize(subject: Subject, recipe: tuple[str, str | None]) -> None:
    name, algorithm = recipe
    config = copy.deepcopy(getattr(mtq, name))
    # Linears alone, as ours.
    config["quant_cfg"].append({"quantizer_name": "*", "parent_class": "nn.LayerNorm", "enable": False})
    if algorithm is not None:
        config["algorithm"] = algorithm
    mtq.quantize(subject.model, config, lambda _: subject.calibrate())


def _round_on_the_cpu() -> None:
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
