"""Random calls of CachedAttention, and what float64 makes of them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nvfp4_reference import Array
from op_inputs import float64, random_t

NAN_BYTE = 127  # of E4M3
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    new: int
    lengths: tuple[int, ...]
    rotary: int = 0  # 0: all of the head, without rotation
    options: dict[str, int | float] = field(default_factory=dict)

    def __str__(self) -> str:
        options = "".join(f" {name} {value}" for name, value in self.options.items())
        return f"{self.heads}/{self.kv_heads}x{self.head_dim} {self.new} after {list(self.lengths)}{options}"

    def attributes(self, fp8: bool) -> dict[str, int | float]:
        rope = {"rope": 1} if self.rotary else {}
        return {"heads": self.heads, "epsilon": 1e-5, "fp8_cache": int(fp8)} | rope | self.options


#: Sequences of one new token and of very different lengths; several new tokens of few heads; a head of 256.
RAGGED = Shape(4, 2, 64, 40, 1, (0, 1, 15, 16, 39), 64)
NORMED = Shape(6, 2, 128, 300, 5, (16, 295), 128, {"qk_norm": 1, "softcap": 5.0})
LONG_HEAD = Shape(4, 1, 256, 600, 3, (577, 0), 128, {"window": 100})
#: More rows than a block of decode takes, the second one's from within a token on, over more splits than a warp of
#: combine takes, by two KV heads; one sequence's tile of keys is not for its first tokens.
SEVERAL_BLOCKS = Shape(6, 2, 64, 680, 7, (650, 13), 64, {"has_sinks": 1})
#: More than a warp's worth of sequences, of a padded head.
MANY_SEQUENCES = Shape(2, 1, 48, 9, 1, tuple(n % 9 for n in range(33)), 48)
#: A head that is padded to 128, in one tile of queries; and several tiles of queries, one from within a token on, and
#: of keys, more than two rounds of stages.
PADDED_HEAD = Shape(3, 1, 112, 150, 20, (0, 111), 112, {"window": 33, "has_sinks": 1, "softcap": 30.0})
SEVERAL_TILES = Shape(6, 2, 128, 400, 67, (330, 0), 128, {"qk_norm": 1, "has_sinks": 1})
#: Every head layout and size, ragged lengths, none and one and full, borders of blocks of keys (16, 32) and of splits.
SHAPES = [
    RAGGED,
    Shape(4, 4, 80, 66, 2, (31, 32, 33, 64), 32, {"rope": 2}),
    Shape(8, 1, 64, 700, 1, (699, 0, 320), 64, {"has_sinks": 1}),
    NORMED,
    LONG_HEAD,
    SEVERAL_BLOCKS,
    MANY_SEQUENCES,
    Shape(2, 2, 96, 90, 16, (0, 74), 96, {"qk_norm": 1, "scale": 0.25}),
    Shape(4, 2, 192, 70, 1, (69, 31), 0, {"window": 1}),
    PADDED_HEAD,
    SEVERAL_TILES,
    Shape(2, 1, 256, 64, 40, (0, 24), 256),
]


def inputs(rng: np.random.Generator, shape: Shape, dtype: torch.dtype, fp8: bool) -> list[torch.Tensor]:
    """In the op's order. What is not cached is NaN: nothing may read it."""
    batch, heads, kv_heads, size = len(shape.lengths), shape.heads, shape.kv_heads, shape.head_dim
    caches = [random_t(rng, (batch, kv_heads, shape.capacity, size), torch.float32) for _ in range(2)]
    scales = [torch.from_numpy(0.005 + rng.random(kv_heads) / 50).float() for _ in range(2)]
    if fp8:
        scaled = [(x / scale[:, None, None]).clamp(-448, 448) for x, scale in zip(caches, scales, strict=True)]
        caches = [x.to(torch.float8_e4m3fn).view(torch.int8) for x in scaled]
    else:
        caches = [x.to(dtype) for x in caches]
    for cache in caches:
        for b, length in enumerate(shape.lengths):
            cache[b, :, length:] = NAN_BYTE if fp8 else torch.nan
    angles = torch.from_numpy(rng.random((shape.capacity, max(shape.rotary // 2, 1))) * 6).float()
    return [
        random_t(rng, (batch, shape.new, (heads + 2 * kv_heads) * size), dtype),
        *caches,
        torch.tensor(shape.lengths),
        angles.cos() * 1.1,  # as scaled tables are
        angles.sin() * 1.1,
        random_t(rng, (size,), dtype),
        random_t(rng, (size,), dtype),
        random_t(rng, (heads,), torch.float32),
        *scales,
    ]


def cached_values(cache: torch.Tensor, scale: torch.Tensor) -> Array:
    if cache.dtype == torch.int8:
        return float64(cache.view(torch.float8_e4m3fn).float()) * float64(scale)[:, None, None]
    return float64(cache)


def rotary_pairs(shape: Shape) -> tuple[Indices, Indices]:
    """Which of a head's dimensions turn together: halves (rope 1) or neighbours (rope 2)."""
    half = np.arange(shape.rotary // 2)
    if shape.attributes(False)["rope"] == 1:
        return half, half + len(half)
    return 2 * half, 2 * half + 1


def sizes(rows: Array, shape: Shape) -> Array:
    """Of rows of heads, the size of what each value is a sum of: of a pair that turns, its length."""
    found = np.abs(rows)
    if shape.rotary:
        one, other = rotary_pairs(shape)
        found[..., one] = found[..., other] = np.hypot(rows[..., one], rows[..., other])
    return found


def new_rows(tensors: list[torch.Tensor], shape: Shape) -> tuple[Array, Array, Array]:
    """Queries, keys and values of the new tokens, [batch, new, heads, head_dim], none rounded."""
    qkv, _, _, _, cos, sin, query_norm, key_norm, *_ = map(float64, tensors)
    batch, heads, kv_heads = len(shape.lengths), shape.heads, shape.kv_heads
    by_head = qkv.reshape(batch, shape.new, heads + 2 * kv_heads, shape.head_dim)
    q, k, v = np.split(by_head, (heads, heads + kv_heads), 2)
    attributes: dict[str, Any] = shape.attributes(False)
    if attributes.get("qk_norm"):
        q, k = (
            x / np.sqrt(np.mean(x**2, -1, keepdims=True) + attributes["epsilon"]) * weight
            for x, weight in ((q, query_norm), (k, key_norm))
        )
    if shape.rotary:
        positions = np.array(shape.lengths)[:, None] + np.arange(shape.new)
        turns = (cos + 1j * sin)[positions][:, :, None]
        pairs = rotary_pairs(shape)
        q, k = q.copy(), k.copy()
        for x in (q, k):
            turned = (x[..., pairs[0]] + 1j * x[..., pairs[1]]) * turns
            x[..., pairs[0]], x[..., pairs[1]] = turned.real, turned.imag
    return q, k, v


def attend(q: Array, keys: Array, values: Array, sinks: Array, shape: Shape) -> Array:
    """y [batch, new, heads * head_dim] from unrounded queries and the values that the caches hold."""
    options = shape.options
    y = np.zeros(q.shape)
    for b, length in enumerate(shape.lengths):
        for t in range(shape.new):
            last = length + t
            first = max(0, last - int(options["window"]) + 1) if options.get("window") else 0
            for h in range(shape.heads):
                head = h // (shape.heads // shape.kv_heads)
                scores = keys[b, head, first : last + 1] @ q[b, t, h] * options.get("scale", shape.head_dim**-0.5)
                if cap := options.get("softcap"):
                    scores = cap * np.tanh(scores / cap)
                logits = np.append(scores, sinks[h]) if options.get("has_sinks") else scores
                weights = np.exp(scores - logits.max()) / np.exp(logits - logits.max()).sum()
                y[b, t, h] = weights @ values[b, head, first : last + 1]
    return y.reshape(*q.shape[:2], -1)
