"""How NVFP4 tensors are made: names joined by `+`, at most one for the block scales, the rest as the user likes."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import Tensor

from trt_nvfp4.calibration.recipes.four_over_six import FOUR_OVER_SIX
from trt_nvfp4.calibration.recipes.max_scale import MAX
from trt_nvfp4.calibration.recipes.mse_sweep import DIAGONAL, LOCAL_HESSIAN, MSE
from trt_nvfp4.calibration.recipes.scale_choice import ScaleChoice
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.plugins.ops.number_formats import E2M1_MAX, SMALLEST_TENSOR_SCALE

SCALES: Mapping[str, ScaleChoice] = MappingProxyType(
    {"max": MAX, "four-over-six": FOUR_OVER_SIX, "mse": MSE, "diagonal": DIAGONAL, "local-hessian": LOCAL_HESSIAN}
)
_OTHERS = ("gptq", "quantized-inputs", "awq")
# Parts of earlier versions, which brought nothing on any model of docs/figures/accuracy.md.
_REMOVED = ("activation-order", "learned")
# By the ops' attribute `scale_search`, whose 0 has no name.
ACTIVATION_SEARCHES: Mapping[str, int] = MappingProxyType({"activation-four-over-six": 1, "activation-sweep": 2})
# By their number, the attribute `residual_channels`: the tensor cores take K in steps of 32.
RESIDUALS: Mapping[str, int] = MappingProxyType({f"residual:{count}": count for count in (32, 64)})
# All parts; docs/how_to/calibration.md says what each does.
NAMES = (*SCALES, *_OTHERS, *ACTIVATION_SEARCHES, *RESIDUALS)
# build-engine's: better than max scaling in every measurement of docs/figures/accuracy.md, and needs no samples.
DEFAULT = "mse"


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe: `scales` is a key of SCALES, `scale_search` and `residual` the ops' attributes, the others say
    which parts were named."""

    scales: str = "max"
    gptq: bool = False
    quantized_inputs: bool = False
    awq: bool = False
    scale_search: int = 0
    residual: int = 0

    def __str__(self) -> str:
        """The spelling that `parse` takes, in the order of NAMES."""
        others = [name for name in _OTHERS if getattr(self, name.replace("-", "_"))]
        searches = [name for name, search in ACTIVATION_SEARCHES.items() if search == self.scale_search]
        residuals = [name for name, count in RESIDUALS.items() if count == self.residual]
        return "+".join([self.scales, *others, *searches, *residuals])

    @property
    def needs(self) -> frozenset[str]:
        """The statistics of a weight's input that quantizing it takes; empty for weight-only recipes."""
        hessians = {"quantized_hessian", "quantized_cross"} if self.quantized_inputs else {"hessian"}
        folding = {"channel_amax", "block_gram"} if self.awq else set()
        return SCALES[self.scales].needs | (hessians if self.gptq else set()) | folding

    @property
    def residual_needs(self) -> frozenset[str]:
        """The statistics that residual channels take beside `needs`: which channels they are, and what is known of
        blocks of 16 once channels are in another order."""
        if not self.residual:
            return frozenset()
        return frozenset({"mean_square", "hessian"} if "block_gram" in self.needs else {"mean_square"})

    def for_16_bit_activations(self) -> "Recipe":
        """The recipe without what concerns NVFP4 activations."""
        return replace(self, quantized_inputs=False, scale_search=0, residual=0)

    def for_weights(self) -> "Recipe":
        """The recipe without what changes no weight but its place."""
        return replace(self, scale_search=0, residual=0)

    def tensor_scale(self, amax: Tensor) -> Tensor:
        """The tensor scale (float32 scalar) of a weight whose largest magnitude is `amax`."""
        return (amax.float() / (E2M1_MAX * SCALES[self.scales].largest)).clamp_min(SMALLEST_TENSOR_SCALE)


def parse(text: str | Recipe) -> Recipe:
    """The recipe that `text` spells, such as "local-hessian+gptq".

    Raises CalibrationError: an unknown or removed name, one twice, two for the block scales of weights or of
    activations, quantized-inputs without gptq or together with awq.
    """
    if isinstance(text, Recipe):
        return text
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if name in _REMOVED:
            raise CalibrationError(f"recipe '{text}': '{name}' was removed, as it brought no accuracy; leave it out")
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            hint = f"did you mean '{near[0]}'? Known" if near else "known"
            raise CalibrationError(f"recipe '{text}': unknown part '{name}'; {hint}: {', '.join(NAMES)}")
        if names.count(name) > 1:
            raise CalibrationError(f"recipe '{text}': '{name}' is named twice")
    scales = [name for name in names if name in SCALES]
    searches = [name for name in names if name in ACTIVATION_SEARCHES]
    residuals = [name for name in names if name in RESIDUALS]
    for chosen, of in (
        (scales, "the block scales"),
        (searches, "the block scales of activations"),
        (residuals, "the residual channels"),
    ):
        if len(chosen) > 1:
            raise CalibrationError(f"recipe '{text}': {' and '.join(chosen)} both choose {of}; name one")
    if "quantized-inputs" in names and "gptq" not in names:
        raise CalibrationError(f"recipe '{text}': 'quantized-inputs' is an option of gptq; add +gptq")
    if {"awq", "quantized-inputs"} <= set(names):
        raise CalibrationError(
            f"recipe '{text}': 'quantized-inputs' needs statistics of the activations that 'awq' has scaled, which are "
            "not collected; name one of the two"
        )
    others = {name.replace("-", "_"): True for name in names if name in _OTHERS}
    search = ACTIVATION_SEARCHES[searches[0]] if searches else 0
    residual = RESIDUALS[residuals[0]] if residuals else 0
    return Recipe(scales[0] if scales else "max", scale_search=search, residual=residual, **others)
