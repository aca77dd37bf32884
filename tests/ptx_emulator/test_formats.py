"""Format conversions against ml_dtypes, NumPy and the definitions of the PTX ISA."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptx_emulator import formats
from ptx_emulator.errors import EmulatorError

REFERENCE = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}
STORAGE = {16: np.uint16}


def _reference_bits(name: str, values: np.ndarray) -> np.ndarray:
    fmt = formats.float_format(name)
    return values.astype(REFERENCE[name]).view(STORAGE.get(fmt.bits, np.uint8)).astype(np.uint32)


@pytest.mark.parametrize("name", REFERENCE)
def test_every_code_decodes_as_the_reference_does(name: str) -> None:
    fmt = formats.float_format(name)
    codes = np.arange(1 << fmt.bits, dtype=STORAGE.get(fmt.bits, np.uint8))
    np.testing.assert_array_equal(fmt.decode(codes), codes.view(REFERENCE[name]).astype(np.float32))


@pytest.mark.parametrize("name", REFERENCE)
@pytest.mark.parametrize("seed", [0, 1])
def test_round_to_nearest_even_matches_the_reference(name: str, seed: int) -> None:
    fmt = formats.float_format(name)
    generator = np.random.default_rng(seed)
    values = np.concatenate(
        [
            generator.normal(size=4000) * np.exp2(generator.integers(-12, 6, 4000)),
            # The midpoints between neighbours are where ties are decided.
            np.convolve(np.sort(fmt.table[np.isfinite(fmt.table)].astype(np.float64)), [0.5, 0.5], "valid"),
        ]
    ).astype(np.float32)
    values = values[np.abs(values) <= fmt.largest]
    # ml_dtypes gives -0 the code of -0; so does the encoder.
    for satfinite in (False, True):
        np.testing.assert_array_equal(fmt.encode(values, satfinite=satfinite), _reference_bits(name, values))


@given(st.floats(width=32, allow_nan=False), st.sampled_from(sorted(REFERENCE)))
def test_directed_rounding_brackets_the_value(x: float, name: str) -> None:
    fmt = formats.float_format(name)
    values = np.float32([x])
    down = float(fmt.decode(fmt.encode(values, "rm", satfinite=True))[0])
    up = float(fmt.decode(fmt.encode(values, "rp", satfinite=True))[0])
    zero = float(fmt.decode(fmt.encode(values, "rz", satfinite=True))[0])
    inside = min(max(x, -fmt.largest), fmt.largest)
    assert down <= inside <= up
    assert zero == (down if x > 0 else up)
    assert down == up or fmt.decode(fmt.encode(values, "rn", satfinite=True))[0] in (down, up)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_saturation_nan_and_relu_follow_the_isa() -> None:
    values = np.float32([np.inf, -np.inf, np.nan, 1e9, -1e9, -0.0, -1.0])
    assert formats.E4M3.encode(values, satfinite=True).tolist() == [0x7E, 0xFE, 0x7F, 0x7E, 0xFE, 0x80, 0xB8]
    assert formats.E4M3.encode(values, satfinite=True, relu=True).tolist() == [0x7E, 0, 0x7F, 0x7E, 0, 0, 0]
    assert formats.E5M2.encode(values, satfinite=True).tolist() == [0x7B, 0xFB, 0x7F, 0x7B, 0xFB, 0x80, 0xBC]
    assert formats.E2M1.encode(values, satfinite=True).tolist() == [7, 15, 7, 7, 15, 8, 10]
    assert formats.F16.encode(values).tolist() == [0x7C00, 0xFC00, 0x7FFF, 0x7C00, 0xFC00, 0x8000, 0xBC00]
    assert formats.F16.encode(np.float32([1e9, -1e9]), "rz").tolist() == [0x7BFF, 0xFBFF]


def test_tf32_rounds_ties_away_and_truncates() -> None:
    tie = np.uint32([0x3F801000, 0x3F803000]).view(np.float32)
    assert formats.TF32.encode(tie, "rna").tolist() == [0x3F802000, 0x3F804000]
    assert formats.TF32.encode(tie, "rn").tolist() == [0x3F800000, 0x3F804000]
    assert formats.TF32.decode(np.uint32([0x3F801FFF]))[0] == 1.0


def test_scale_factors() -> None:
    powers = np.float32(2.0) ** np.arange(-126, 128, dtype=np.float32)
    np.testing.assert_array_equal(formats.UE8M0.encode(powers), np.arange(1, 255))
    np.testing.assert_array_equal(formats.UE8M0.encode(powers * np.float32(1.25), "rz"), np.arange(1, 255))
    np.testing.assert_array_equal(
        formats.UE8M0.encode(powers * np.float32(1.25), "rp", satfinite=True), np.minimum(np.arange(2, 256), 254)
    )
    assert formats.UE8M0.encode(np.float32([np.nan, np.inf, 0.0])).tolist() == [255, 255, 0]
    np.testing.assert_array_equal(
        formats.UE8M0.table[:255], np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    )
    np.testing.assert_array_equal(formats.UE4M3.decode(np.arange(127)), formats.E4M3.decode(np.arange(127)))
    with pytest.raises(EmulatorError, match="negative"):
        formats.UE4M3.encode(np.float32([-1.0]))


@pytest.mark.parametrize("type_name", ["e2m1x2", "e2m1x4", "e4m3x2", "e5m2x4", "e3m2x2", "f16x2", "bf16x2", "ue8m0x2"])
def test_packed_conversions_put_the_first_operand_highest(type_name: str) -> None:
    count = int(type_name.rpartition("x")[2])
    elements = [np.full(32, 2.0**i, np.float32) for i in range(count)]
    rounding = "rz" if type_name.startswith("ue8m0") else "rn"
    packed = formats.encode_packed(type_name, elements, rounding, satfinite=True)
    for low_first, expected in zip(formats.decode_packed(type_name, packed), reversed(elements), strict=True):
        largest = 6.0 if type_name.startswith("e2m1") else np.inf
        np.testing.assert_array_equal(low_first, np.minimum(expected, largest))
