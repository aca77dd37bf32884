"""`wgmma` on operands that CuTe's SM90 layouts placed, against float64 products."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ptx_emulator import cute_reference, formats, mma, wgmma
from ptx_emulator.errors import UnknownInstructionError

ATOMS = {"INTER": 32, "SW32": 32, "SW64": 64, "SW128": 128}  # bytes of K in a tile
TYPES = {"half_t": ("f16", 16), "bfloat16_t": ("bf16", 16), "float_e4m3_t": ("e4m3", 8), "tfloat32_t": ("tf32", 32)}
OPERANDS = [(t, m) for t in TYPES for m in (("K", "MN") if TYPES[t][1] == 16 else ("K",))]


def _body() -> str:
    body = [
        "using namespace cutlass;",
        'show("C", SM90::GMMA::CLayout_64x128{});',
        'show("A16", SM90::GMMA::ALayout_64x16{});',
        'show("A8", SM90::GMMA::ALayout_64x32{});',
    ]
    for atom, depth in ATOMS.items():
        for name, major in OPERANDS:
            bits = TYPES[name][1]
            k = depth * 8 // bits if major == "K" else 512 // bits
            body.append(
                f"""{{
                auto l = tile_to_shape(GMMA::Layout_{major}_{atom}_Atom<{name}>{{}}, Shape<_128, Int<{k}>>{{}});
                auto offsets = as_position_independent_swizzle_layout(l);
                show("{atom}.{name}.{major}", offsets);
                auto t = make_tensor(make_smem_ptr(({name}*)0), l);
                auto d = SM90::GMMA::make_gmma_desc<GMMA::Major::{major}>(
                    local_tile(t, Shape<_128, Int<{256 // bits}>>{{}}, make_coord(0, 0)));
                for (int i = 0; i < {k * bits // 256}; ++i)
                    printf("@{atom}.{name}.{major}.d%d 1 4 %d %d %d %d\\n", i, int(d.bitfield.leading_byte_offset_),
                           int(d.bitfield.stride_byte_offset_), int(d.bitfield.layout_type_),
                           int(l(0, i * {256 // bits})));
                }}"""
            )
    return "\n".join(body)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[np.int64]]:
    return cute_reference.layouts(_body(), tmp_path_factory.mktemp("cute"))


def _shared(codes: NDArray[np.uint32], layout: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    elements = np.zeros(int(layout.max()) + 1, {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits])
    elements[layout.T.reshape(-1)] = codes.T.reshape(-1)
    return elements.view(np.uint8)


def _descriptor(start: int, fields: NDArray[np.int64], bits: int) -> int:
    leading, stride, mode, offset = (int(v) for v in fields.reshape(-1))
    return (start + offset * bits // 8) >> 4 | leading << 16 | stride << 32 | mode << 62


@pytest.mark.parametrize("a_in_registers", [False, True])
@pytest.mark.parametrize(("name", "major"), OPERANDS)
@pytest.mark.parametrize("atom", ATOMS)
def test_matches_a_float64_product(
    atom: str, name: str, major: str, a_in_registers: bool, layouts: dict[str, NDArray[np.int64]], seed: int
) -> None:
    type_name, bits = TYPES[name]
    generator = np.random.default_rng(seed)
    layout = layouts[f"{atom}.{name}.{major}"]
    k, per_k = layout.size // 128, 256 // bits
    fmt = formats.float_format(type_name)
    assert isinstance(fmt, formats.FloatFormat)
    a, b = (fmt.encode(generator.normal(size=(rows, k)), satfinite=True) for rows in (64, 128))
    memory = np.zeros(256 * 1024, np.uint8)
    for start, codes in ((1024, np.pad(a, ((0, 64), (0, 0)))), (128 * 1024, b)):
        data = _shared(codes, layout, bits)
        memory[start : start + data.size] = data

    def read(addresses: NDArray[np.uint64], count: int) -> NDArray[np.uint8]:
        return memory[addresses.astype(np.int64)[:, None] + np.arange(count)]

    variant = wgmma.decode(("wgmma", "mma_async", f"m64n128k{per_k}", "f32", type_name, type_name))
    c = generator.normal(size=(64, 128)).astype(np.float32)
    expected = fmt.decode(a).astype(np.float64) @ -fmt.decode(b).astype(np.float64).T + c
    row, column = np.unravel_index(layouts["C"], (64, 128), order="F")  # [128 threads, 64 values]
    for warp in range(4):
        threads = slice(32 * warp, 32 * warp + 32)
        d = np.ascontiguousarray(c[row[threads], column[threads]].T).view(np.uint32)
        for step in range(k // per_k):
            fields = layouts[f"{atom}.{name}.{major}.d{step}"]
            if a_in_registers:
                mine = a[16 * warp : 16 * warp + 16, step * per_k : (step + 1) * per_k]
                operand: NDArray[np.uint32] | int = _a_fragment(mine, bits)
            else:
                operand = _descriptor(1024, fields, bits)
            d = variant.execute(
                warp + 4,
                operand,
                _descriptor(128 * 1024, fields, bits),
                d,
                read,
                accumulate=True,
                b_scale=-1,
                a_mn_major=major == "MN" and not a_in_registers,
                b_mn_major=major == "MN",
            )
        result = d.view(np.float32).T
        np.testing.assert_allclose(result, expected[row[threads], column[threads]], rtol=1e-5, atol=1e-4)


def _a_fragment(codes: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """Registers [4, 32]: the inverse of mma.a_values, which test_mma.py checks against CuTe."""
    registers = np.zeros((4, 32), np.uint32)
    register, lane, shift = mma._a_index(codes.shape[1], bits)
    np.bitwise_or.at(registers, (register, lane), codes << shift)
    return registers


@pytest.mark.parametrize("bits", [16, 8])
def test_a_fragments_are_cutes(bits: int, layouts: dict[str, NDArray[np.int64]]) -> None:
    k = 256 // bits
    codes = np.arange(64 * k, dtype=np.uint32).reshape(k, 64).T % (1 << bits)
    for warp in range(4):
        values = codes.T.reshape(-1)[layouts[f"A{bits}"][32 * warp : 32 * warp + 32]]
        packed = values.reshape(32, 4, 32 // bits) << (bits * np.arange(32 // bits, dtype=np.uint32))
        ours = _a_fragment(codes[16 * warp : 16 * warp + 16], bits)
        np.testing.assert_array_equal(ours, packed.sum(axis=2).T)


@pytest.mark.parametrize("start", [1024, 1536, 2048 + 128])
@pytest.mark.parametrize("pattern", ["at multiples of 1024", "at the operand"])
def test_the_pattern_of_an_operand_with_no_base_offset(start: int, pattern: str, seed: int) -> None:
    """It lies at multiples of 1024 bytes: of an operand that was swizzled from its own start, other chunks are read."""
    generator = np.random.default_rng(seed)
    operands = generator.integers(1, 9, (2, 64, 16)).astype(np.float16)
    memory = np.zeros(64 * 1024, np.uint8)
    row, chunk = np.mgrid[:64, :2]
    for place, values in zip((start, start + 32 * 1024), operands, strict=True):
        origin = place if pattern == "at the operand" else 0
        address = place - origin + 128 * row + 16 * chunk
        address = origin + (address ^ (address >> 7 & 7) << 4)
        memory[address[..., None] + np.arange(16)] = values.view(np.uint8).reshape(64, 2, 16)

    def read(addresses: NDArray[np.uint64], count: int) -> NDArray[np.uint8]:
        return memory[addresses.astype(np.int64)[:, None] + np.arange(count)]

    a, b = ((place >> 4) | 64 << 32 | 1 << 62 for place in (start, start + 32 * 1024))
    variant = wgmma.decode(("wgmma", "mma_async", "m64n64k16", "f32", "f16", "f16"))
    d = variant.execute(1, a, b, np.zeros((32, 32), np.uint32), read, accumulate=False)
    product = operands[0, 16:32].astype(np.float64) @ operands[1].astype(np.float64).T
    right = np.array_equal(mma.unpack_accumulator(d, "f32", 64), product)
    assert right is (pattern == "at multiples of 1024" or start % 1024 == 0)


def test_half_precision_accumulators_and_integers() -> None:
    memory = np.random.default_rng(1).integers(0, 256, 8192, dtype=np.uint8)

    def read(addresses: NDArray[np.uint64], count: int) -> NDArray[np.uint8]:
        return memory[addresses.astype(np.int64)[:, None] + np.arange(count)]

    # No swizzle: 8 rows of 16 bytes, the second chunk of K 128 bytes on, the next 8 rows 256 bytes on.
    descriptor = 8 << 16 | 16 << 32
    rows = memory[: 64 * 32].reshape(8, 2, 8, 16).transpose(0, 2, 1, 3).reshape(64, 32).view(np.int8).astype(np.int64)
    variant = wgmma.decode(("m64n8k32", "s32", "s8", "s8"))
    d = variant.execute(2, descriptor, descriptor, np.zeros((4, 32), np.uint32), read, accumulate=False)
    expected = rows[32:48] @ rows[:8].T
    np.testing.assert_array_equal(mma.unpack_accumulator(d, "s32", 8), expected)
    half = wgmma.decode(("m64n8k32", "f16", "e4m3", "e4m3"))
    memory &= 0xB7  # no NaN, small values
    d = half.execute(0, descriptor, descriptor, np.zeros((2, 32), np.uint32), read, accumulate=False)
    values = formats.E4M3.decode(memory[: 64 * 32]).reshape(8, 2, 8, 16).transpose(0, 2, 1, 3).reshape(64, 32)
    expected = (values[:16].astype(np.float64) @ values[:8].astype(np.float64).T).astype(np.float16)
    np.testing.assert_array_equal(mma.unpack_accumulator(d, "f16", 8), expected)


def test_unknown_variants() -> None:
    with pytest.raises(UnknownInstructionError, match="sparse"):
        wgmma.decode(("wgmma", "mma_async", "sp", "m64n8k32", "f32", "f16", "f16"))
