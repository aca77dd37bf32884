"""NVFP4Decoder: a chain of L decoder layers, each of cached attention and a gated MLP; and what it shares with ops
whose layers have something else behind their attention.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from trt_nvfp4.plugins.ops import function_body as text
from trt_nvfp4.plugins.ops.activation import Activation, gate, gate_onnx
from trt_nvfp4.plugins.ops.cached_attention import (
    ATTENTION_CONSTANTS,
    ATTENTION_STATEMENTS,
    MAX_HEAD_DIM,
    ROPE_INTERLEAVED,
    ROPE_NONE,
    cached_attention,
)
from trt_nvfp4.plugins.ops.definition import Formal, OpDefinition, Shape, ShapeRule
from trt_nvfp4.plugins.ops.number_formats import BLOCK
from trt_nvfp4.plugins.ops.reference import dequantize_weight, linear, rms_norm
from trt_nvfp4.plugins.ops.weight_format import NVFP4

_CACHE = "[L, 2, batch, kv_heads, capacity, head_dim]"


def weight_formals(name: str, rows: str, k: str, stack: str = "L") -> tuple[Formal, ...]:
    """The inputs of an NVFP4 weight [stack, rows, k] and its bias."""
    tiled = f"ceil({rows}/128)*128, ceil({k}/16/4)*4"
    return (
        Formal(f"{name}_weight", "tensor(int8)", f"[{stack}, {rows}, {k}/2] E2M1, two per byte"),
        Formal(f"{name}_scales", "tensor(int8)", f"[{stack}, {tiled}] E4M3, 128x4 tiled"),
        Formal(f"{name}_tensor_scale", "tensor(float)", f"[{stack}] multipliers"),
        Formal(f"{name}_bias", "T", f"[{stack}, {rows}]"),
    )


#: Attributes of a call, and a layer's inputs by name.
Attributes = Mapping[str, int | float]
Layer = Mapping[str, Tensor]


@dataclass(frozen=True)
class LayerMlp:
    """The part of a layer behind its attention, with the norm in front of it.

    Attributes:
        inputs: its constants, with the layers as the first axis.
        reference: its output, float32, for normed rows [..., K] float32, x's type, a layer's inputs and attributes.
        shapes: checks the shapes of `inputs` for a number of layers and K.
        statements: ONNX that computes mlp_sum, float32, from middle_normed; the layer's inputs are called NAME_i.
        constants: statements in front of the loop over layers, for its own attributes.
    """

    inputs: tuple[Formal, ...]
    reference: Callable[[Tensor, torch.dtype, Layer, Attributes], Tensor]
    shapes: Callable[[ShapeRule, int, int], None]
    statements: str
    constants: str = ""
    attributes: dict[str, int | float] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)


_ATTENTION = (
    Formal("attention_norm_weight", "T", "[L, K]"),
    Formal("q_norm_weight", "T", "[L, head_dim]; not read unless qk_norm is 1"),
    Formal("k_norm_weight", "T", "[L, head_dim]; not read unless qk_norm is 1"),
    Formal("key_scale", "tensor(float)", "[L, kv_heads] multipliers of E4M3 keys; not read unless fp8_cache is 1"),
    Formal("value_scale", "tensor(float)", "[L, kv_heads] multipliers of E4M3 values"),
    *weight_formals("qkv", "(heads + 2 kv_heads) head_dim", "K"),
    *weight_formals("output", "K", "(heads head_dim)"),
    Formal("mlp_norm_weight", "T", "[L, K]"),
)


def product(rows: Tensor, name: str, layer: Layer) -> Tensor:
    """rows W^T + b, float32, of a layer's weight."""
    weight, scales, tensor_scale, bias = (
        layer[f"{name}_{part}"] for part in ("weight", "scales", "tensor_scale", "bias")
    )
    return linear(rows, dequantize_weight(weight, scales, tensor_scale), bias)


def gated(rows: Tensor, dtype: torch.dtype, layer: Layer, attributes: Attributes) -> Tensor:
    """down(act(gate(rows)) * up(rows)), float32; hidden values are rounded to `dtype`."""
    up = product(rows, "up", layer)
    act, alpha, limit = Activation(int(attributes["activation"])), attributes["alpha"], attributes["limit"]
    return product(gate(act, up[..., 0::2], up[..., 1::2], alpha, limit).to(dtype).float(), "down", layer)


def _reference(
    mlp: LayerMlp,
    x: Tensor,
    past: Tensor,
    past_length: Tensor,
    cos: Tensor,
    sin: Tensor,
    *per_layer: Tensor,
    heads: int,
    rope: int,
    qk_norm: int,
    fp8_cache: int,
    window: int,
    epsilon: float,
    scale: float,
    softcap: float,
    **others: int | float,
) -> tuple[Tensor, Tensor]:
    names = [formal.name for formal in (*_ATTENTION, *mlp.inputs)]
    state, present = x.float(), torch.empty_like(past)
    for i in range(past.shape[0]):
        layer = dict(zip(names, (tensor[i] for tensor in per_layer), strict=True))
        normed = rms_norm(state, layer["attention_norm_weight"], epsilon, x.dtype)
        attended, present[i, 0], present[i, 1] = cached_attention(
            product(normed, "qkv", layer).to(x.dtype),
            past[i, 0],
            past[i, 1],
            past_length,
            cos,
            sin,
            layer["q_norm_weight"],
            layer["k_norm_weight"],
            x.new_zeros(heads, dtype=torch.float32),
            layer["key_scale"],
            layer["value_scale"],
            heads=heads,
            rope=rope,
            qk_norm=qk_norm,
            has_sinks=0,
            fp8_cache=fp8_cache,
            window=window,
            epsilon=epsilon,
            scale=scale,
            softcap=softcap,
        )
        state = (product(attended.float(), "output", layer) + state).to(x.dtype).float()
        rows = rms_norm(state, layer["mlp_norm_weight"], epsilon, x.dtype)
        state = (mlp.reference(rows, x.dtype, layer, others) + state).to(x.dtype).float()
    return state.to(x.dtype), present


def _shapes(mlp: LayerMlp, rule: ShapeRule) -> list[Shape]:
    heads = rule.attributes["heads"]
    x, past, cos = (rule.shapes[name] for name in ("x", "past", "cos"))
    known = len(past) == 6 and all(isinstance(past[i], int) for i in (0, 3, 5))
    if not known or past[0] == 0:
        raise rule.error(f"past must be {_CACHE} with L >= 1, L, kv_heads and head_dim known, found {list(past)}")
    layers, _, batch, kv_heads, _, head_dim = past
    assert isinstance(kv_heads, int)
    assert isinstance(head_dim, int)
    if kv_heads < 1 or heads % kv_heads:
        raise rule.error(f"the cache's KV heads must divide heads, {heads}, found {kv_heads}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise rule.error(f"the head size must be 1 to {MAX_HEAD_DIM}, found {head_dim}")
    if (heads * head_dim) % BLOCK:
        raise rule.error(f"heads times their size must be a multiple of {BLOCK}, found {heads * head_dim}")
    if len(x) != 3 or len(cos) != 2:
        raise rule.error(f"x must have 3 dimensions and cos 2, found {len(x)} and {len(cos)}")
    _, k = rule.rows("x")
    rule.expect("x", (batch, None, k))
    rule.expect("past", (layers, 2, *past[2:]))
    if isinstance(batch, int):
        rule.expect("past_length", (batch,))
    rule.expect("sin", cos)
    half = cos[1]
    if rule.attributes["rope"] != ROPE_NONE and isinstance(half, int) and not 1 <= half <= head_dim // 2:
        raise rule.error(f"cos must have 1 to {head_dim // 2} columns, half the head size, found {half}")
    for name, size in (
        ("attention_norm_weight", k),
        ("mlp_norm_weight", k),
        ("q_norm_weight", head_dim),
        ("k_norm_weight", head_dim),
        ("key_scale", kv_heads),
        ("value_scale", kv_heads),
    ):
        rule.expect(name, (layers, size))
    for name, rows, columns in (("qkv", (heads + 2 * kv_heads) * head_dim, k), ("output", k, heads * head_dim)):
        check_weight(rule, name, rows, columns, (layers,))
    assert isinstance(layers, int)
    mlp.shapes(rule, layers, k)
    return [x, past]


def check_weight(rule: ShapeRule, name: str, rows: int, columns: int, stack: Shape) -> None:
    """Checks an NVFP4 weight and its bias."""
    if (found := NVFP4.check(rule, name, columns, stack)) != rows:
        raise rule.error(f"{name}_weight must have {rows} rows, found {found}")
    rule.expect(f"{name}_bias", (*stack, rows))


def check_gated(rule: ShapeRule, k: int, stack: Shape) -> None:
    """Checks a gated MLP's weights."""
    up = NVFP4.check(rule, "up", k, stack)
    if up % 2:
        raise rule.error(f"up_weight must have an even number of rows (gate and up), found {up}")
    check_weight(rule, "up", up, k, stack)
    check_weight(rule, "down", k, up // 2, stack)


def product_onnx(y: str, x: str, name: str, of: str = "i") -> str:
    """y float32 = x W^T + b of a weight, whatever the dimensions of x in front; its inputs are called NAME_{of}."""
    parts = (f"{name}_{part}_{of}" for part in ("weight", "scales", "tensor_scale"))
    return f"""{text.dequantize_weight(f"{y}_w", *parts)}
            {y}_w_t = Transpose<perm = [1, 0]>({y}_w)
            {y}_alone = MatMul({x}, {y}_w_t)
            {y}_bias = Cast<to = {text.FLOAT}>({name}_bias_{of})
            {y} = Add({y}_alone, {y}_bias)"""


def gated_onnx(y: str, x: str, of: str = "i") -> str:
    """y float32 of a gated MLP. Names of what it computes on the way begin with y."""
    return f"""{product_onnx(f"{y}_up", x, "up", of)}
            {y}_last_column = Constant<value = int64[1] {{9223372036854775807}}>()
            {y}_gate_half = Slice({y}_up, index_0, {y}_last_column, axis_last, index_2)
            {y}_up_half = Slice({y}_up, index_1, {y}_last_column, axis_last, index_2)
            {gate_onnx(f"{y}_hidden_32", f"{y}_gate_half", f"{y}_up_half")}
            {y}_hidden_typed = CastLike({y}_hidden_32, x)
            {y}_hidden = Cast<to = {text.FLOAT}>({y}_hidden_typed)
            {product_onnx(y, f"{y}_hidden", "down", of)}"""


def _layer(mlp: LayerMlp) -> str:
    return f"""
            {
        "".join(
            f'''
            {formal.name}_i = Gather({formal.name}, layer)'''
            for formal in (*_ATTENTION, *mlp.inputs)
        )
    }
            past_i = Gather(past, layer)
            {text.rms_norm("normed", "state", "attention_norm_weight_i")}
            {product_onnx("qkv_float_32", "normed", "qkv")}
            qkv = CastLike(qkv_float_32, x)
            past_key = Gather(past_i, scalar_0)
            past_value = Gather(past_i, scalar_1)
            {
        ATTENTION_STATEMENTS.replace("q_norm_weight", "q_norm_weight_i")
        .replace("k_norm_weight", "k_norm_weight_i")
        .replace("(key_scale", "(key_scale_i")
        .replace("(value_scale", "(value_scale_i")
    }
            attended_32 = Cast<to = {text.FLOAT}>(attended)
            {product_onnx("output_sum", "attended_32", "output")}
            middle_sum = Add(output_sum, state)
            middle_typed = CastLike(middle_sum, x)
            middle = Cast<to = {text.FLOAT}>(middle_typed)
            {text.rms_norm("middle_normed", "middle", "mlp_norm_weight_i")}
            {mlp.statements}
            layer_output = Add(mlp_sum, middle)
            layer_output_typed = CastLike(layer_output, x)
            next_state = Cast<to = {text.FLOAT}>(layer_output_typed)
            present_key_1 = Unsqueeze(present_key, index_0)
            present_value_1 = Unsqueeze(present_value, index_0)
            present_i = Concat<axis = 0>(present_key_1, present_value_1)
            go_on = Identity(condition)
"""


def _body(mlp: LayerMlp) -> str:
    return f"""
        {text.constants()}
        {text.e4m3_table()}
        {ATTENTION_CONSTANTS}
        {text.attribute_int("heads")}
        {text.attribute_int("rope")}
        {text.attribute_int("window")}
        {text.attribute_int("activation")}
        {text.attribute_flag("qk_norm")}
        {text.attribute_flag("fp8_cache")}
        {text.attribute_float("epsilon")}
        {text.attribute_float("scale")}
        {text.attribute_float("softcap")}
        {text.attribute_float("alpha")}
        {text.attribute_float("limit")}
        {mlp.constants}
        has_sinks = Constant<value = bool {{0}}>()
        sinks_shape = Unsqueeze(heads, index_0)
        sinks = Expand(zero_f, sinks_shape)
        x_float = Cast<to = {text.FLOAT}>(x)
        layers_shape = Shape<start = 0, end = 1>(past)
        layers = Squeeze(layers_shape, index_0)
        always = Constant<value = bool {{1}}>()
        last_state, presents = Loop(layers, always, x_float) <
            body = one_layer (int64 layer, bool condition, float[given, tokens, width] state)
                => (bool go_on, float[given, tokens, width] next_state, present_i) {{ {_layer(mlp)} }}
        >
        y = CastLike(last_state, x)
        past_shape = Shape(past)
        present = Reshape<allowzero = 1>(presents, past_shape)
"""


def layers_op(name: str, doc: str, mlp: LayerMlp) -> OpDefinition:
    """The op for a chain of layers with `mlp` behind their attention."""
    return OpDefinition(
        name=name,
        doc=doc,
        inputs=(
            Formal("x", "T", "[batch, new, K], K a multiple of 16"),
            Formal("past", "C", f"{_CACHE} T, or with fp8_cache E4M3 bytes"),
            Formal("past_length", "L", "[batch] tokens cached, 0 to capacity"),
            Formal("cos", "tensor(float)", "[positions, rotary_dim / 2]; not read if rope is 0"),
            Formal("sin", "tensor(float)", "[positions, rotary_dim / 2]"),
            *_ATTENTION,
            *mlp.inputs,
        ),
        outputs=(
            Formal("y", "T", "[batch, new, K]"),
            Formal("present", "C", f"{_CACHE}; in place where it is bound to the address of past"),
        ),
        attributes={
            "heads": 1,
            "rope": ROPE_NONE,
            "qk_norm": 0,
            "fp8_cache": 0,
            "window": 0,
            "activation": int(Activation.SILU),
            "epsilon": 1e-6,
            "scale": 0.0,
            "softcap": 0.0,
            "alpha": 1.702,
            "limit": 7.0,
            **mlp.attributes,
        },
        body=_body(mlp),
        torch_reference=partial(_reference, mlp),
        shape_rule=partial(_shapes, mlp),
        ranges={
            "heads": (1, 65535),
            "rope": (ROPE_NONE, ROPE_INTERLEAVED),
            "window": (0, 2**31 - 1),
            **mlp.ranges,
        },
        takes_no_tokens=True,
    )


NVFP4_DECODER = layers_op(
    name="NVFP4Decoder",
    doc="""For each of L layers: q, k, v = qkv(RMSNorm(x) * attention_norm_weight); a = attention over the layer's
cache, to which k and v are appended, as CachedAttention has it (past[l, 0] are keys, past[l, 1] values); r = output(a)
+ x; n = RMSNorm(r) * mlp_norm_weight; x = down(act(gate(n)) * up(n)) + r, rows of up_weight alternating gate and up.
Within these steps float32; q, k, v, a, r, the hidden activations, what norms make and x are rounded to x's type. Up
to 16 tokens (batch times new) can take one launch for all layers (the DECODER tactic; AUTO takes it for one token)
where head_dim is a multiple of 16 and all other sizes are multiples of 32; else the same weights go through kernels for
each part.""",
    mlp=LayerMlp(
        inputs=(*weight_formals("up", "2I", "K"), *weight_formals("down", "K", "I")),
        reference=gated,
        shapes=lambda rule, layers, k: check_gated(rule, k, (layers,)),
        statements=gated_onnx("mlp_sum", "middle_normed"),
    ),
)
