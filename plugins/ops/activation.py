"""The activations of the ops: their numbers, and each one in Torch and in ONNX, side by side."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional


class Activation(IntEnum):
    """The `activation` attribute of every op."""

    IDENTITY = 0
    RELU = 1
    RELU2 = 2  # squared ReLU
    SILU = 3
    GELU = 4  # by erf
    GELU_TANH = 5
    GELU_QUICK = 6  # x * sigmoid(1.702 x)
    SWIGLU_CLAMPED = 7  # gated only: gpt-oss's, with `alpha` and `limit`
    SILU_CLAMPED = 8  # gated only: silu with both clamped by `limit`, as of DeepSeek-V4


#: Those that clamp gate and up by `limit`.
GATED_ONLY = (Activation.SWIGLU_CLAMPED, Activation.SILU_CLAMPED)


@dataclass(frozen=True)
class _Formula:
    torch: Callable[[Tensor], Tensor]
    onnx: str  # statements that compute {y} from {x}; names that they introduce begin with {y}_


_FORMULAS = {
    Activation.IDENTITY: _Formula(lambda x: x, "{y} = Identity({x})"),
    Activation.RELU: _Formula(functional.relu, "{y} = Relu({x})"),
    Activation.RELU2: _Formula(
        lambda x: functional.relu(x).square(),
        """{y}_positive = Relu({x})
        {y} = Mul({y}_positive, {y}_positive)""",
    ),
    Activation.SILU: _Formula(
        functional.silu,
        """{y}_sigmoid = Sigmoid({x})
        {y} = Mul({x}, {y}_sigmoid)""",
    ),
    Activation.GELU: _Formula(
        functional.gelu,
        """{y}_sqrt_half = Constant<value_float: float = 0.70710678>()
        {y}_half = Constant<value_float: float = 0.5>()
        {y}_one = Constant<value_float: float = 1.0>()
        {y}_scaled = Mul({x}, {y}_sqrt_half)
        {y}_erf = Erf({y}_scaled)
        {y}_cdf = Add({y}_erf, {y}_one)
        {y}_halved = Mul({x}, {y}_half)
        {y} = Mul({y}_halved, {y}_cdf)""",
    ),
    Activation.GELU_TANH: _Formula(
        lambda x: functional.gelu(x, approximate="tanh"),
        """{y}_sqrt_2_over_pi = Constant<value_float: float = 0.79788456>()
        {y}_cubic = Constant<value_float: float = 0.044715>()
        {y}_half = Constant<value_float: float = 0.5>()
        {y}_one = Constant<value_float: float = 1.0>()
        {y}_square = Mul({x}, {x})
        {y}_cube = Mul({y}_square, {x})
        {y}_third = Mul({y}_cube, {y}_cubic)
        {y}_sum = Add({x}, {y}_third)
        {y}_inner = Mul({y}_sum, {y}_sqrt_2_over_pi)
        {y}_tanh = Tanh({y}_inner)
        {y}_cdf = Add({y}_tanh, {y}_one)
        {y}_halved = Mul({x}, {y}_half)
        {y} = Mul({y}_halved, {y}_cdf)""",
    ),
    Activation.GELU_QUICK: _Formula(
        lambda x: x * torch.sigmoid(1.702 * x),
        """{y}_slope = Constant<value_float: float = 1.702>()
        {y}_scaled = Mul({x}, {y}_slope)
        {y}_sigmoid = Sigmoid({y}_scaled)
        {y} = Mul({x}, {y}_sigmoid)""",
    ),
}

_CLAMP_ONNX = """{y}_gate = Min({gate}, limit)
        {y}_low = Neg(limit)
        {y}_above = Max({up}, {y}_low)
        {y}_up = Min({y}_above, limit)
        """
_CLAMPED_ONNX = {
    Activation.SWIGLU_CLAMPED: _CLAMP_ONNX
    + """{y}_one = Constant<value_float: float = 1.0>()
        {y}_shifted = Add({y}_up, {y}_one)
        {y}_scaled = Mul({y}_gate, alpha)
        {y}_sigmoid = Sigmoid({y}_scaled)
        {y}_gated = Mul({y}_shifted, {y}_gate)
        {y} = Mul({y}_gated, {y}_sigmoid)""",
    Activation.SILU_CLAMPED: _CLAMP_ONNX
    + """{y}_sigmoid = Sigmoid({y}_gate)
        {y}_activated = Mul({y}_gate, {y}_sigmoid)
        {y} = Mul({y}_activated, {y}_up)""",
}


def activate(activation: Activation, x: Tensor) -> Tensor:
    """act(x), elementwise, in x's dtype."""
    return _FORMULAS[activation].torch(x)


def gate(activation: Activation, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """act(gate) * up; for GATED_ONLY, with gate' = min(gate, limit) and up' = up within -limit and limit:
    (up' + 1) * gate' * sigmoid(alpha * gate') (SWIGLU_CLAMPED), silu(gate') * up' (SILU_CLAMPED)."""
    if activation not in GATED_ONLY:
        return activate(activation, gate) * up
    gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    if activation is Activation.SILU_CLAMPED:
        return functional.silu(gate) * up
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def activate_onnx(y: str, x: str) -> str:
    """ONNX statements for y = act(x), by the scalar `activation` (int64) in scope: one If per choice, nested."""
    choices = list(_FORMULAS)

    def branch(index: int, y: str) -> str:
        choice = choices[index]
        if index == len(choices) - 1:
            return _FORMULAS[choice].onnx.format(x=x, y=y)
        name = f"{y}_{choice.name.lower()}"
        return f"""{name}_number = Constant<value = int64 {{{int(choice)}}}>()
        {name}_chosen = Equal(activation, {name}_number)
        {y} = If({name}_chosen) <
            then_branch = {name}_then () => ({name}) {{ {_FORMULAS[choice].onnx.format(x=x, y=name)} }},
            else_branch = {name}_else () => ({name}_other) {{ {branch(index + 1, f"{name}_other")} }}
        >"""

    return branch(0, y)


def gate_onnx(y: str, gate: str, up: str) -> str:
    """ONNX statements for y = `gate(...)`, by the scalars `activation`, `alpha` and `limit` (float32) in scope."""
    rest = f"""{activate_onnx(f"{y}_activated", gate)}
                {y}_product = Mul({y}_activated, {up})"""
    product = f"{y}_product"
    for choice, clamped in _CLAMPED_ONNX.items():
        name = f"{y}_{choice.name.lower()}"
        rest = f"""{name}_number = Constant<value = int64 {{{int(choice)}}}>()
        {name}_chosen = Equal(activation, {name}_number)
        {name}_result = If({name}_chosen) <
            then_branch = {name}_then () => ({name}) {{ {clamped.format(y=name, gate=gate, up=up)} }},
            else_branch = {name}_else () => ({product}) {{ {rest} }}
        >"""
        product = f"{name}_result"
    return f"""{rest}
        {y} = Identity({product})"""
