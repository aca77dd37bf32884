"""llm-compressor (vLLM's; PyPI `llmcompressor`), as its examples use it: `oneshot` with the preset NVFP4 over the same
batches. It rounds on the CPU itself; its AWQ would pin memory for a GPU, and is kept from it. Its GPTQ goes layer by
layer, on inputs that earlier layers have quantized, and orders columns by activations: so does ours here. Its AWQ folds
scales as ours does, in its own choice of places. Experts are linears of their own, as in its own models.
"""

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.accuracy.libraries.library import Library
from benchmarks.accuracy.subjects import Subject

# Modifiers, and the observer that chooses block scales of weights where it is not the preset's.
RECIPES = {
    "max": ("max", ("round", None)),
    "mse": ("mse", ("round", "nvfp4_expanded_mse")),
    "awq": ("max+awq", ("awq", None)),
    "gptq": ("max+gptq", ("gptq", None)),
    "gptq on mse": ("mse+gptq", ("gptq", "nvfp4_expanded_mse")),
}


def library() -> Library:
    """llm-compressor, without pinned memory."""
    IntermediatesCache.pin_memory = lambda *_: None
    return Library("llmcompressor", version("llmcompressor"), RECIPES, _quantize, _keep_activations)


def _quantize(subject: Subject, recipe: tuple[str, str | None]) -> None:
    kind, observer = recipe
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    if observer is not None:
        scheme.weights.observer = observer
    quantized = {id(linear) for site in subject.sites for linear in site.linears}
    modules = subject.model.named_modules()
    others = [name for name, module in modules if isinstance(module, nn.Linear) and id(module) not in quantized]
    what: dict[str, Any] = {"config_groups": {"group_0": scheme}, "ignore": others}
    modifiers = [GPTQModifier(**what) if kind == "gptq" else QuantizationModifier(**what)]
    if kind == "awq":
        modifiers.insert(0, AWQModifier())
    oneshot(
        model=subject.model,
        recipe=modifiers,
        dataset=DataLoader(subject.calibration, batch_size=None),
        num_calibration_samples=len(subject.calibration),
        tokenizer=SimpleNamespace(),  # not asked for: the batches are tokens
    )


def _keep_activations(subject: Subject) -> None:
    for site in subject.sites:
        for linear in site.linears:
            linear.quantization_scheme.input_activations = None
