"""`mma.sync` on random fragments, placed by CuTe's layouts, against float64 matrix products."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ptx_emulator import cute_reference, formats, mma
from ptx_emulator.errors import UnknownInstructionError

# The opcode, CuTe's traits for its fragments, and how the elements sit in their containers.
CASES = {
    "m16n8k16.row.col.f32.f16.f16.f32": "SM80_16x8x16_F32F16F16F32_TN",
    "m16n8k16.row.col.f16.f16.f16.f16": "SM80_16x8x16_F16F16F16F16_TN",
    "m16n8k16.row.col.f32.bf16.bf16.f32": "SM80_16x8x16_F32BF16BF16F32_TN",
    "m16n8k8.row.col.f32.tf32.tf32.f32": "SM80_16x8x8_F32TF32TF32F32_TN",
    "m16n8k32.row.col.f32.e4m3.e5m2.f32": "SM80_16x8x32_S32S8S8S32_TN",
    "m16n8k32.row.col.satfinite.s32.s8.u8.s32": "SM80_16x8x32_S32S8S8S32_TN",
    "kind::f8f6f4.m16n8k32.row.col.f32.e2m1.e3m2.f32": "SM80_16x8x32_S32S8S8S32_TN",
    "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e2m1.f32.ue8m0": "SM80_16x8x32_S32S8S8S32_TN",
    "kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3": (
        "SM120::BLOCKSCALED::SM120_16x8x64_TN_VS<float_e2m1_t, float_e2m1_t, float, float_ue4m3_t, 16>"
    ),
    "kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0": (
        "SM120::BLOCKSCALED::SM120_16x8x64_TN_VS<float_e2m1_t, float_e2m1_t, float, float_ue8m0_t, 32>"
    ),
}


@pytest.fixture(scope="module")
def fragments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[np.int64]]:
    body = ["using namespace cutlass;"]
    for index, traits in enumerate(dict.fromkeys(CASES.values())):
        body += [f'show("{operand}{index}", MMA_Traits<{traits}>::{operand}Layout{{}});' for operand in "ABC"]
    return cute_reference.layouts("\n".join(body), tmp_path_factory.mktemp("cute"))


def _place(codes: NDArray[np.uint32], layout: NDArray[np.int64], bits: int) -> NDArray[np.uint32]:
    """Codes of a matrix, first mode fastest, to registers [n, 32] by a (thread, value) layout."""
    values = codes.T.reshape(-1)[layout]
    per_register = 32 // bits
    packed = values.reshape(32, -1, per_register) << (bits * np.arange(per_register, dtype=np.uint32))
    return np.ascontiguousarray(np.bitwise_or.reduce(packed, axis=2).T.astype(np.uint32))


def _random_codes(generator: np.random.Generator, type_name: str, shape: tuple[int, int]) -> NDArray[np.uint32]:
    if type_name in mma.INTEGER_BITS:
        return generator.integers(0, 256, shape, dtype=np.uint32)
    fmt = formats.float_format(type_name)
    assert isinstance(fmt, formats.FloatFormat)
    return fmt.encode(generator.normal(size=shape) * 1.5, satfinite=True)


def _values(codes: NDArray[np.uint32], type_name: str) -> NDArray[np.float64]:
    if type_name in mma.INTEGER_BITS:
        return codes.astype(np.uint8 if type_name == "u8" else np.int8).astype(np.float64)
    return formats.float_format(type_name).decode(codes).astype(np.float64)


@pytest.mark.parametrize("opcode", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_matches_a_float64_product(opcode: str, seed: int, fragments: dict[str, NDArray[np.int64]]) -> None:
    generator = np.random.default_rng(seed)
    variant = mma.decode(tuple(opcode.split(".")))
    m, n, k = variant.m, variant.n, variant.k
    index = list(dict.fromkeys(CASES.values())).index(CASES[opcode])
    a = _random_codes(generator, variant.a_type, (m, k))
    b = _random_codes(generator, variant.b_type, (n, k))
    bits = variant.container_bits
    # FP4 sits in bits 2..5 of its byte outside the mxf4 kinds.
    a_shift = 2 if bits == 8 and variant.a_type == "e2m1" else 0
    b_shift = 2 if bits == 8 and variant.b_type == "e2m1" else 0
    a_registers = _place(a << a_shift, fragments[f"A{index}"], bits)
    b_registers = _place(b << b_shift, fragments[f"B{index}"], bits)
    c_layout = fragments[f"C{index}"]
    if variant.d_type == "s32":
        c = generator.integers(-1000, 1000, (m, n)).astype(np.float64)
        c_codes = c.astype(np.int32).view(np.uint32)
    else:
        c = generator.normal(size=(m, n)).astype(np.float16).astype(np.float64)
        c_codes = formats.F16.encode(c) if variant.c_type == "f16" else c.astype(np.float32).view(np.uint32)
    accumulator_bits = 16 if variant.d_type == "f16" else 32
    c_registers = _place(c_codes, c_layout, accumulator_bits)

    a_values, b_values = _values(a, variant.a_type), _values(b, variant.b_type)
    scales: list[object] = []
    if variant.scale_vectors:
        byte_a = mma.BYTE_IDS[variant.scale_vectors][seed % len(mma.BYTE_IDS[variant.scale_vectors])]
        byte_b = mma.BYTE_IDS[variant.scale_vectors][-1]
        # CuTe: lane 4g + p of a pair holds row g + 8p; for B each lane of the chosen column of quads holds column g.
        for rows, byte_id, thread_id, values in ((16, byte_a, 1 - seed, a_values), (8, byte_b, 3 - seed, b_values)):
            low, high = (120, 134) if variant.scale_type == "ue8m0" else (1, 127)
            codes = generator.integers(low, high, (rows, variant.scale_vectors), dtype=np.uint32)
            registers = generator.integers(0, 2**32, 32, dtype=np.uint32)
            for row, block in itertools.product(range(rows), range(variant.scale_vectors)):
                lane = 4 * (row % 8) + (2 * thread_id + row // 8 if rows == 16 else thread_id)
                shift = 8 * (byte_id + block)
                registers[lane] = (int(registers[lane]) & ~(0xFF << shift)) | int(codes[row, block]) << shift
            values *= np.repeat(
                formats.float_format(str(variant.scale_type)).decode(codes), k // variant.scale_vectors, 1
            )
            scales += [registers, (byte_id, thread_id)]

    expected = a_values @ b_values.T + c
    d = variant.execute(a_registers, b_registers, c_registers, *scales)  # type: ignore[arg-type]
    if variant.d_type == "s32":
        expected_codes = expected.astype(np.int32).view(np.uint32)
    elif variant.d_type == "f16":
        expected_codes = formats.F16.encode(expected)
    else:
        expected_codes = expected.astype(np.float32).view(np.uint32)
    np.testing.assert_array_equal(d, _place(expected_codes, c_layout, accumulator_bits))


def test_nan_and_infinity_propagate() -> None:
    variant = mma.decode(("m16n8k16", "row", "col", "f32", "f16", "f16", "f32"))
    a, b, c = np.zeros((4, 32), np.uint32), np.full((2, 32), 0x3C003C00, np.uint32), np.zeros((4, 32), np.uint32)
    a[0, 0] = 0x7C00  # row 0, column 0: infinity
    a[1, 4] = 0x7E00  # row 9, column 0: NaN
    rows = variant.execute(a, b, c).view(np.float32)
    assert np.isposinf(rows[0:2, 0:4]).all()
    assert np.isnan(rows[2:4, 4:8]).all()
    assert (rows[0:2, 4:] == 0).all()


@pytest.mark.parametrize(
    "opcode",
    [
        "m8n8k4.row.col.f64.f64.f64.f64",
        "sp::ordered_metadata.m16n8k32.row.col.f32.f16.f16.f32",
        "m16n8k16.col.col.f32.f16.f16.f32",
    ],
)
def test_unknown_variants_are_named(opcode: str) -> None:
    with pytest.raises(UnknownInstructionError, match=r"mma\.sync"):
        mma.decode(tuple(opcode.split(".")))


def test_cute_scale_layout_agrees_with_the_selectors(tmp_path: Path) -> None:
    traits = CASES["kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3"]
    result = cute_reference.layouts(
        f'using namespace cutlass; show("a", MMA_Traits<{traits}>::SFALayout{{}}); '
        f'show("b", MMA_Traits<{traits}>::SFBLayout{{}});',
        tmp_path,
    )
    lane = np.arange(32)
    np.testing.assert_array_equal(result["a"][:, 0] % 16, lane // 4 + 8 * (lane % 2))
    np.testing.assert_array_equal(result["b"][:, 0] % 8, lane // 4)
