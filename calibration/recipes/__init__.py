"""Recipes: how weights and activation scales become NVFP4. One file per method, each with its source."""

from trt_nvfp4.calibration.recipes.awq import SEARCHED_ROWS, channel_scales
from trt_nvfp4.calibration.recipes.quantizer import QuantizedWeight, WeightQuantizer, quantize_weight
from trt_nvfp4.calibration.recipes.recipe import DEFAULT, NAMES, RESIDUALS, SCALES, Recipe, parse
from trt_nvfp4.calibration.statistics.input_statistics import InputStatistics

__all__ = [
    "DEFAULT",
    "NAMES",
    "RESIDUALS",
    "SCALES",
    "SEARCHED_ROWS",
    "InputStatistics",
    "QuantizedWeight",
    "Recipe",
    "WeightQuantizer",
    "channel_scales",
    "parse",
    "quantize_weight",
]
