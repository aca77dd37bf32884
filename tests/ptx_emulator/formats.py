"""Narrow floating-point formats: bit-exact decoding to float32 and encoding with PTX's rounding and saturation.

A format is described by its exponent and mantissa widths; one encoder and one decoder serve them all. Sources: PTX ISA
`cvt`, OCP Microscaling Formats 1.0 (E2M1, E2M3, E3M2, E8M0) and OCP FP8 1.0 (E4M3, E5M2).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ptx_emulator.errors import EmulatorError

ROUNDINGS = ("rn", "rna", "rz", "rp", "rm")


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format of at most 32 bits.

    `nan` is the canonical NaN code that `cvt` produces, None where the format has none (NaN then becomes the largest
    positive value). `infinity` tells whether codes above `largest` start with an infinity.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    nan: int | None
    infinity: bool
    signed: bool = True
    shift: int = 0  # tf32 keeps its 19 bits at the top of a 32-bit register

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """Value of every code (formats of at most 16 bits)."""
        codes = np.arange(1 << self.bits, dtype=np.uint32)
        return self._decode(codes)

    @cached_property
    def _exact_table(self) -> NDArray[np.float64]:
        return self.table.astype(np.float64)

    def exact(self, codes: NDArray[Any]) -> NDArray[np.float64]:
        """As `decode`, in float64."""
        if self.bits > 16:
            return self.decode(codes).astype(np.float64)
        exact: NDArray[np.float64] = self._exact_table.take(codes & codes.dtype.type((1 << self.bits) - 1))
        return exact

    def _decode(self, codes: NDArray[np.uint32]) -> NDArray[np.float32]:
        m = self.mantissa_bits
        magnitude = codes & ((1 << (self.exponent_bits + m)) - 1)
        exponent = (magnitude >> m).astype(np.int64)
        fraction = (magnitude & ((1 << m) - 1)).astype(np.float64)
        value = np.where(
            exponent == 0,
            np.ldexp(fraction, 1 - self.bias - m),
            np.ldexp(fraction + (1 << m), exponent - self.bias - m),
        )
        if self.infinity:
            top = (1 << self.exponent_bits) - 1
            value = np.where(exponent == top, np.where(fraction == 0, np.inf, np.nan), value)
        elif self.nan is not None:
            value = np.where(magnitude == self.nan, np.nan, value)
        if self.signed:
            value = np.where(codes >> (self.exponent_bits + m) & 1, -value, value)
        return value.astype(np.float32)

    def decode(self, codes: ArrayLike) -> NDArray[np.float32]:
        """Codes (any unsigned dtype) to float32, same shape; every supported format is exact in float32."""
        codes = np.asarray(codes)
        if self.bits <= 16:
            return self.table[codes & ((1 << self.bits) - 1)]
        return (codes.astype(np.uint32) & np.uint32(~((1 << self.shift) - 1) & 0xFFFFFFFF)).view(np.float32)

    def encode(
        self, values: ArrayLike, rounding: str = "rn", satfinite: bool = False, relu: bool = False
    ) -> NDArray[np.uint32]:
        """float32 (or float64) values to codes.

        rounding: rn (ties to even), rna (ties away), rz, rp, rm. Without `satfinite` an overflow becomes infinity, or
        NaN where the format has no infinity. `relu` clamps negatives, -0 included, to +0 and leaves NaN canonical.
        """
        if rounding == "rn" and not relu:
            nearest = (self._nearest_finite if satfinite else self._nearest)(np.asarray(values))
            if nearest is not None:
                return nearest
        x = np.asarray(values, dtype=np.float64)
        nan = np.isnan(x)
        negative = np.signbit(x) & ~nan
        magnitude = np.abs(np.where(nan, 0.0, x))
        infinite = np.isinf(magnitude)
        _, exponent = np.frexp(np.where(infinite, 0.0, magnitude))
        lowest_exponent = 1 - self.bias
        exponent = np.where(magnitude == 0, lowest_exponent, np.maximum(exponent - 1, lowest_exponent))
        scaled = np.ldexp(np.where(infinite, 0.0, magnitude), self.mantissa_bits - exponent)
        steps = _round(scaled, rounding, negative)
        rounded = np.ldexp(steps, exponent - self.mantissa_bits)
        code = ((exponent - lowest_exponent).astype(np.int64) << self.mantissa_bits) + steps.astype(np.int64)
        largest = self._largest_code
        overflow = infinite | (rounded > self.largest)
        # Rounding towards zero never leaves the finite range unless the source is infinite.
        inward = ~infinite & ((rounding == "rz") | ((rounding == "rp") & negative) | ((rounding == "rm") & ~negative))
        if satfinite:
            code = np.where(overflow, largest, code)
        elif self.infinity:
            code = np.where(overflow, np.where(inward, largest, largest + 1), code)
        else:
            code = np.where(overflow, largest if self.nan is None else self.nan, code)
        if relu:
            code = np.where(negative, 0, code)
        elif self.signed:
            code = code | (negative.astype(np.int64) << (self.exponent_bits + self.mantissa_bits))
        elif np.any(negative & (magnitude > 0)):
            raise EmulatorError(f"cvt to {self.name}: a negative value has no code")
        code = np.where(nan, largest if self.nan is None else self.nan, code)
        return (code.astype(np.int64) << self.shift).astype(np.uint32)

    def _nearest(self, values: NDArray[Any]) -> NDArray[np.uint32] | None:
        """`encode` to f16, and of float32 to bf16, in few operations: what kernels convert most. None for others."""
        if self.name == "f16":
            codes = values.astype(np.float16).view(np.uint16).astype(np.uint32)
        elif self.name == "bf16" and values.dtype == np.float32:
            bits = values.view(np.uint32)
            codes = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
        else:
            return None
        nan = np.isnan(values)
        return np.where(nan, np.uint32(0x7FFF), codes) if 1 in nan.tobytes() else codes

    def _nearest_finite(self, values: NDArray[Any]) -> NDArray[np.uint32] | None:
        """`encode` with `satfinite` to a signed format of at most 8 bits, in few operations. None for others."""
        if self.bits > 8 or not self.signed:
            return None
        codes = np.searchsorted(self._thresholds, np.abs(values), side="right").astype(np.uint32)
        codes |= np.signbit(values).astype(np.uint32) << np.uint32(self.exponent_bits + self.mantissa_bits)
        nan = np.isnan(values)
        return np.where(nan, np.uint32(self._largest_code if self.nan is None else self.nan), codes)

    @cached_property
    def _thresholds(self) -> NDArray[np.float64]:
        """The least magnitude that is rounded to each code but the first; half-way ones go to the even code."""
        values = self.exact(np.arange(self._largest_code + 1))
        middles = (values[:-1] + values[1:]) / 2
        middles[::2] = np.nextafter(middles[::2], np.inf)
        return middles

    @cached_property
    def _largest_code(self) -> int:
        fraction, exponent = np.frexp(self.largest)
        steps = int(np.ldexp(fraction, self.mantissa_bits + 1))
        return ((int(exponent) - 1 - (1 - self.bias)) << self.mantissa_bits) + steps


def _round(x: NDArray[np.float64], rounding: str, negative: NDArray[np.bool_]) -> NDArray[np.float64]:
    if rounding == "rn":
        return np.rint(x)
    if rounding == "rna":
        return np.floor(x + 0.5)
    if rounding == "rz":
        return np.floor(x)
    if rounding == "rp":
        return np.where(negative, np.floor(x), np.ceil(x))
    if rounding == "rm":
        return np.where(negative, np.ceil(x), np.floor(x))
    raise EmulatorError(f"unknown rounding .{rounding}; known: {', '.join(ROUNDINGS)}")


E2M1 = FloatFormat("e2m1", 4, 2, 1, 1, 6.0, None, False)
E2M3 = FloatFormat("e2m3", 6, 2, 3, 1, 7.5, None, False)
E3M2 = FloatFormat("e3m2", 6, 3, 2, 3, 28.0, None, False)
E4M3 = FloatFormat("e4m3", 8, 4, 3, 7, 448.0, 0x7F, False)
UE4M3 = FloatFormat("ue4m3", 7, 4, 3, 7, 448.0, 0x7F, False, signed=False)
E5M2 = FloatFormat("e5m2", 8, 5, 2, 15, 57344.0, 0x7F, True)
F16 = FloatFormat("f16", 16, 5, 10, 15, 65504.0, 0x7FFF, True)
BF16 = FloatFormat("bf16", 16, 8, 7, 127, float.fromhex("0x1.fep127"), 0x7FFF, True)
TF32 = FloatFormat("tf32", 32, 8, 10, 127, float.fromhex("0x1.ffcp127"), 0x3FFFF, True, shift=13)


class _UE8M0:
    """Power-of-two scale factors: code c is 2**(c - 127), 0xFF is NaN. The sign of a source is ignored."""

    name = "ue8m0"
    bits = 8

    @cached_property
    def table(self) -> NDArray[np.float32]:
        value = np.ldexp(1.0, np.arange(256) - 127)
        value[255] = np.nan
        return value.astype(np.float32)

    def decode(self, codes: ArrayLike) -> NDArray[np.float32]:
        """uint8 codes to float32 (2**-127 is a float32 subnormal)."""
        return self.table[np.asarray(codes) & 0xFF]

    def exact(self, codes: NDArray[Any]) -> NDArray[np.float64]:
        """As `decode`, in float64."""
        return self.decode(codes).astype(np.float64)

    def encode(self, values: ArrayLike, rounding: str = "rz", satfinite: bool = False) -> NDArray[np.uint32]:
        """float32 values to codes; rounding rz (down) or rp (up), below 2**-127 becomes code 0."""
        if rounding not in ("rz", "rp"):
            raise EmulatorError(f"cvt to ue8m0 rounds with .rz or .rp, not .{rounding}")
        x = np.abs(np.asarray(values, dtype=np.float64))
        finite = np.isfinite(x)
        fraction, exponent = np.frexp(np.where(finite, x, 1.0))
        up = (rounding == "rp") & (fraction > 0.5)
        code = np.clip(np.where(fraction == 0, 0, exponent - 1 + up + 127), 0, None)
        overflow = np.isinf(x) | (code > 254)
        code = np.where(overflow, 254 if satfinite else 255, code)
        return np.where(np.isnan(x), 255, code).astype(np.uint32)


UE8M0 = _UE8M0()

BY_NAME: dict[str, FloatFormat | _UE8M0] = {
    f.name: f for f in (E2M1, E2M3, E3M2, E4M3, UE4M3, E5M2, F16, BF16, TF32, UE8M0)
}


def float_format(name: str) -> FloatFormat | _UE8M0:
    """The format of a PTX type name such as "e4m3"."""
    if name not in BY_NAME:
        raise EmulatorError(f"no floating-point format named {name!r}; known: {', '.join(BY_NAME)}")
    return BY_NAME[name]


def _packed(type_name: str) -> tuple[FloatFormat | _UE8M0, int, int]:
    """(format, elements, bits between elements) of a packed PTX type such as "e2m1x2" or "f16x2"."""
    base, _, count = type_name.partition("x")
    fmt = float_format(base)
    # FP6 elements of a packed type sit in bytes, zero-extended.
    return fmt, int(count or 1), 8 if fmt.bits in (6, 7) else fmt.bits


def encode_packed(
    type_name: str, elements: list[NDArray[np.float32]], rounding: str, satfinite: bool, relu: bool = False
) -> NDArray[np.uint32]:
    """`cvt` to a packed type. `elements` in the order of the PTX operands: the first lands in the highest bits."""
    fmt, count, stride = _packed(type_name)
    if len(elements) != count:
        raise EmulatorError(f"cvt to {type_name} takes {count} values, got {len(elements)}")
    if relu and fmt is UE8M0:
        raise EmulatorError("cvt to ue8m0 has no .relu")
    result = np.zeros(np.shape(elements[0]), np.uint32)
    for position, values in enumerate(reversed(elements)):
        if isinstance(fmt, FloatFormat):
            code = fmt.encode(values, rounding, satfinite or fmt.nan is None, relu)
        else:
            code = fmt.encode(values, rounding, satfinite)
        result |= code << np.uint32(position * stride)
    return result


def decode_packed(type_name: str, codes: ArrayLike) -> list[NDArray[np.float32]]:
    """The float32 elements of a packed register, lowest bits first."""
    fmt, count, stride = _packed(type_name)
    codes = np.asarray(codes, dtype=np.uint32)
    return [fmt.decode(codes >> np.uint32(i * stride)) for i in range(count)]
