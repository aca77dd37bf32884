"""Random calls of NVFP4Decoder and NVFP4MoEDecoder, and what float64 makes of them."""

from dataclasses import dataclass, field
from typing import Any

import attention_cases
import numpy as np
import torch
from nvfp4_reference import Array, Weight
from op_inputs import float64, random_t

_OF_MLP = ("activation", "top_k", "scoring", "renormalize", "scaling_factor")


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    new: int
    lengths: tuple[int, ...]
    options: dict[str, int | float] = field(default_factory=dict)
    experts: int = 0  # of a mixture

    @property
    def op(self) -> str:
        return "NVFP4MoEDecoder" if self.experts else "NVFP4Decoder"

    def __str__(self) -> str:
        options = "".join(f" {name} {value}" for name, value in self.options.items())
        heads = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        mixture = f"x{self.experts}" if self.experts else ""
        sizes = f"{self.layers}x{self.hidden}/{self.intermediate}{mixture}"
        return f"{sizes} {heads} {self.new} after {list(self.lengths)}{options}"

    @property
    def tokens(self) -> int:
        return self.new * len(self.lengths)

    def attributes(self, fp8: bool) -> dict[str, int | float]:
        return {"heads": self.heads, "rope": 1, "epsilon": 1e-5, "fp8_cache": int(fp8)} | self.options

    def attention(self) -> attention_cases.Shape:
        options = {name: value for name, value in self.options.items() if name not in _OF_MLP}
        return attention_cases.Shape(
            self.heads, self.kv_heads, self.head_dim, self.capacity, self.new, self.lengths, self.head_dim, options
        )


@dataclass(frozen=True)
class Case:
    shape: Shape
    inputs: list[torch.Tensor]
    weights: dict[str, Weight]
    fp8: bool
    router: torch.Tensor | None = None  # [layers, experts, hidden]


#: Splits of K and of keys, several tasks a block, head layouts, ragged batches, none cached, borders of blocks of keys
#: (16, 32) and a full cache; padded heads, and heads that two warps share.
SHAPES = [
    Shape(2, 64, 96, 4, 2, 64, 40, 1, (17,)),
    Shape(3, 256, 544, 8, 2, 64, 150, 1, (0,), {"qk_norm": 1}),
    Shape(2, 288, 320, 4, 1, 128, 300, 1, (299,), {"window": 100}),
    Shape(2, 128, 160, 6, 2, 32, 70, 2, (0, 31, 64), {"softcap": 20.0}),
    Shape(2, 160, 96, 4, 4, 64, 200, 1, (0, 1, 15, 16, 31, 32, 198, 199), {"qk_norm": 1}),
    Shape(2, 96, 128, 8, 1, 48, 90, 5, (0, 80, 63), {"rope": 2}),
    Shape(2, 96, 64, 8, 2, 128, 130, 16, (101,), {"scale": 0.25}),
    Shape(2, 128, 96, 2, 1, 256, 330, 1, (329,), {"qk_norm": 1}),
    Shape(2, 64, 96, 4, 2, 144, 90, 1, (0,), {"softcap": 30.0}),
    Shape(2, 64, 64, 2, 1, 192, 70, 4, (0, 33, 66), {"window": 20}),
    Shape(1, 64, 64, 8, 1, 256, 200, 1, (0, 1, 15, 16, 31, 32, 64, 198, 199)),
]


#: Mixtures: experts that start in the middle of a block's chunks, fewer and more experts than blocks, all chosen, one
#: chosen; several tokens, more than a block has warps; experts that the parts alone take.
MIXTURES = [
    Shape(2, 128, 256, 4, 2, 64, 40, 1, (17,), {"top_k": 2, "renormalize": 1, "qk_norm": 1}, experts=8),
    Shape(3, 320, 256, 4, 1, 128, 90, 1, (0,), {"top_k": 5, "scaling_factor": 1.5}, experts=24),
    Shape(2, 96, 512, 2, 1, 64, 40, 1, (39,), {"top_k": 3, "scoring": 2}, experts=3),
    Shape(2, 64, 256, 2, 2, 32, 40, 1, (5,), {"scoring": 1}, experts=40),
    Shape(2, 64, 256, 4, 2, 64, 40, 1, (0, 20, 39), {"top_k": 2, "renormalize": 1}, experts=8),
    Shape(1, 288, 512, 2, 1, 64, 90, 5, (0, 80), {"top_k": 2, "scoring": 2}, experts=4),
]
PARTS_ALONE = Shape(2, 64, 32, 4, 2, 64, 40, 3, (0, 20), {"top_k": 2, "renormalize": 1}, experts=5)


def random_case(rng: np.random.Generator, shape: Shape, dtype: torch.dtype, fp8: bool) -> Case:
    """What is not cached is NaN: nothing may read it."""
    layers, k, i = shape.layers, shape.hidden, shape.intermediate
    attended = shape.heads * shape.head_dim
    qkv_rows = attended + 2 * shape.kv_heads * shape.head_dim
    sizes = {"qkv": (qkv_rows, k), "output": (k, attended), "up": (2 * i, k), "down": (k, i)}
    stacks = dict.fromkeys(sizes, (layers,))
    if shape.experts:
        stacks |= dict.fromkeys(("up", "down"), (layers, shape.experts))
    weights = {name: Weight.random(rng, *size, stacks[name]) for name, size in sizes.items()}
    for weight in weights.values():  # sums near one, whatever the seed
        weight.tensor_scale /= 4
        weight.values /= 4
    calls = [attention_cases.inputs(rng, shape.attention(), dtype, fp8) for _ in range(layers)]
    past = torch.stack([torch.stack(call[1:3]) for call in calls])

    def stacked(index: int) -> torch.Tensor:
        return torch.stack([call[index] for call in calls])

    def projection(name: str) -> list[torch.Tensor]:
        return [*weights[name].tensors, random_t(rng, (*stacks[name], sizes[name][0]), dtype) * 0.1]

    norms = [1 + random_t(rng, (layers, k), dtype) * 0.1 for _ in range(2)]
    router = random_t(rng, (layers, shape.experts, k), dtype) * (2 / k**0.5) if shape.experts else None
    return Case(
        shape,
        [
            random_t(rng, (len(shape.lengths), shape.new, k), dtype),
            past,
            *calls[0][3:6],
            norms[0],
            stacked(6),
            stacked(7),
            stacked(9),
            stacked(10),
            *projection("qkv"),
            *projection("output"),
            norms[1],
            *([] if router is None else [router]),
            *projection("up"),
            *projection("down"),
        ],
        weights,
        fp8,
        router,
    )


def _norm(x: Array, weight: Array, epsilon: float) -> Array:
    result: Array = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon) * weight
    return result


class CloseChoiceError(Exception):
    """Experts whose scores are so close that rounding decides between them."""


def _mlp(case: Case, rows: Array, layer: int) -> Array:
    """Of normed rows [batch, new, hidden]."""
    shape, tensors = case.shape, case.inputs
    biases = {name: float64(tensors[at + (case.router is not None)]) for name, at in (("up", 22), ("down", 26))}

    def gated(x: Array, at: tuple[int, ...]) -> Array:
        up = x @ case.weights["up"].values[at].T + biases["up"][at]
        gate = up[..., 0::2]
        result: Array = gate / (1 + np.exp(-gate)) * up[..., 1::2] @ case.weights["down"].values[at].T
        return result + biases["down"][at]

    if case.router is None:
        return gated(rows, (layer,))
    options = {"top_k": 1, "scoring": 0, "renormalize": 0, "scaling_factor": 1.0} | shape.options
    logits = rows @ float64(case.router)[layer].T
    softmax = np.exp(logits - logits.max(-1, keepdims=True))
    scores = [softmax / softmax.sum(-1, keepdims=True), 1 / (1 + np.exp(-logits)), logits][int(options["scoring"])]
    order = np.argsort(-logits, -1, kind="stable")
    k = int(options["top_k"])
    if k < shape.experts:
        ranked = np.take_along_axis(logits, order, -1)
        close = 8e-3 if tensors[0].dtype == torch.float16 else 4e-2
        if (ranked[..., k - 1] - ranked[..., k]).min() < close:
            raise CloseChoiceError
    experts = order[..., :k]
    weights = np.take_along_axis(scores, experts, -1)
    if options["scoring"] == 2:
        weights = np.exp(weights - weights.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
    if options["renormalize"]:
        weights /= weights.sum(-1, keepdims=True)
    result = np.zeros_like(rows)
    for at in np.ndindex(*experts.shape):
        result[at[:-1]] += options["scaling_factor"] * weights[at] * gated(rows[at[:-1]], (layer, int(experts[at])))
    return result


def expected(case: Case, present: torch.Tensor) -> tuple[Array, list[tuple[Array, Array]]]:
    """y, and each layer's keys and values of the new tokens [batch, new, kv_heads, head_dim], none rounded. Attention
    reads what is cached in `present`. Raises CloseChoiceError."""
    shape, tensors = case.shape, case.inputs
    epsilon: Any = shape.attributes(case.fp8)["epsilon"]
    x = float64(tensors[0])
    names = {"qkv": 13, "output": 17}
    appended = []

    def product(rows: Array, name: str, layer: int) -> Array:
        result: Array = rows @ case.weights[name].values[layer].T + float64(tensors[names[name]])[layer]
        return result

    for layer in range(shape.layers):
        qkv = product(_norm(x, float64(tensors[5])[layer], epsilon), "qkv", layer)
        call = [torch.from_numpy(qkv), *tensors[1][layer], *tensors[2:5], tensors[6][layer], tensors[7][layer]]
        call += [torch.zeros(shape.heads), tensors[8][layer], tensors[9][layer]]
        q, *new = attention_cases.new_rows(call, shape.attention())
        held = [
            attention_cases.cached_values(cache, scale)
            for cache, scale in zip(present[layer], (tensors[8][layer], tensors[9][layer]), strict=True)
        ]
        a = attention_cases.attend(q, *held, np.zeros(shape.heads), shape.attention())
        x = product(a, "output", layer) + x
        x = _mlp(case, _norm(x, float64(tensors[18])[layer], epsilon), layer) + x
        appended.append((new[0], new[1]))
    return x, appended
