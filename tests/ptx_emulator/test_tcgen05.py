"""tcgen05 MMAs on operands that CuTe's layouts placed, against float64 products."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ptx_emulator import cute_reference, formats, tcgen05
from ptx_emulator.errors import EmulatorError, MemoryFault, UnknownInstructionError
from ptx_emulator.tcgen05 import Cta, InstructionDescriptor
from ptx_emulator.tensor_memory import TensorMemory

# Swizzle mode field and CuTe's atom, per name.
ATOMS = {"INTER": 0, "SW32": 6, "SW64": 4, "SW128": 2}
K_TILE = {"INTER": 32, "SW32": 32, "SW64": 64, "SW128": 128}  # bytes of K in the tile that CuTe lays out
TYPES = {"half_t": 16, "float_e4m3_t": 8, "float_e2m1_t": 4, "tfloat32_t": 32}


class Shared:
    """Shared memory of one CTA as flat bytes."""

    def __init__(self) -> None:
        self.data = np.zeros(128 * 1024, np.uint8)

    def read(self, addresses: NDArray[np.uint64], count: int) -> NDArray[np.uint8]:
        return self.data[addresses.astype(np.int64)[:, None] + np.arange(count)]

    def put(self, start: int, codes: NDArray[np.uint32], layout: NDArray[np.int64], bits: int) -> None:
        """Codes at element offsets, the layout's coordinate order being that of `codes` in column-major order."""
        flat = codes.T.reshape(-1)
        index = layout.T.reshape(-1)
        if bits == 4:
            nibbles = np.zeros(int(index.max()) + 2 & ~1, np.uint8)
            nibbles[index] = flat
            stream = nibbles[0::2] | nibbles[1::2] << 4
        else:
            dtype = {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits]
            elements = np.zeros(int(index.max()) + 1, dtype)
            elements[index] = flat
            stream = elements.view(np.uint8)
        self.data[start : start + stream.size] = stream


ROWS = 128  # of every tile that CuTe lays out


def _show_tiles() -> str:
    """CuTe's tile layout and, per instruction along K, descriptor fields for every atom, type and major-ness."""
    body = ["using namespace cutlass;"]
    for name in ATOMS:
        for type_name, bits in TYPES.items():
            for major in ("K", "MN") if bits in (8, 16) else ("K",):
                key = f"{name}.{type_name}.{major}"
                k = K_TILE[name] * 8 // bits if major == "K" else 512 // bits
                body.append(
                    f"""{{
                    auto l = tile_to_shape(UMMA::Layout_{major}_{name}_Atom<{type_name}>{{}},
                                           Shape<Int<{ROWS}>, Int<{k}>>{{}});
                    show("{key}", as_position_independent_swizzle_layout(l));
                    auto t = make_tensor(make_smem_ptr(({type_name}*)0), l);
                    auto a = local_tile(t, Shape<Int<{ROWS}>, Int<{256 // bits}>>{{}}, make_coord(0, 0));
                    auto d = UMMA::make_umma_desc<UMMA::Major::{major}>(a);
                    for (int i = 0; i < {k * bits // 256}; ++i)
                        printf("@{key}.d%d 1 5 %d %d %d %d %d\\n", i, int(d.leading_byte_offset_),
                               int(d.stride_byte_offset_), int(d.layout_type_), int(d.version_),
                               int(l(0, i * {256 // bits})));
                    }}"""
                )
    return "\n".join(body)


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[np.int64]]:
    return cute_reference.layouts(_show_tiles(), tmp_path_factory.mktemp("cute"))


def _padded(codes: NDArray[np.uint32], columns: int) -> NDArray[np.uint32]:
    return np.pad(codes, ((0, ROWS - codes.shape[0]), (0, columns - codes.shape[1])))


def _codes(generator: np.random.Generator, type_name: str, shape: tuple[int, int]) -> NDArray[np.uint32]:
    fmt = formats.float_format(type_name)
    assert isinstance(fmt, formats.FloatFormat)
    return fmt.encode(generator.normal(size=shape) * 2, satfinite=True)


def _descriptor(start: int, fields: NDArray[np.int64], bits: int) -> int:
    """The 64 bits from CuTe's fields, the start moved to where the instruction's K begins."""
    leading, stride, mode, version, offset = (int(v) for v in fields.reshape(-1))
    address = start + offset * bits // 8
    return address >> 4 | leading << 16 | stride << 32 | version << 46 | mode << 61


def _idesc(
    m: int, n: int, a: int = 0, b: int = 0, c: int = 1, *, a_mn: bool = False, b_mn: bool = False, extra: int = 0
) -> int:
    return c << 4 | a << 7 | b << 10 | a_mn << 15 | b_mn << 16 | n >> 3 << 17 | m >> 4 << 24 | extra


KINDS = {"half_t": ("f16", "f16", 0), "float_e4m3_t": ("f8f6f4", "e4m3", 0), "tfloat32_t": ("tf32", "tf32", 2)}


def _accumulated(memory: TensorMemory, m: int, n: int) -> NDArray[np.float32]:
    lanes = np.arange(m) if m == 128 else np.arange(64) // 16 * 32 + np.arange(64) % 16
    return memory.cells[lanes, 16 : 16 + n].view(np.float32)


@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize(
    ("type_name", "major"),
    [("half_t", "K"), ("half_t", "MN"), ("float_e4m3_t", "K"), ("float_e4m3_t", "MN"), ("tfloat32_t", "K")],
)
@pytest.mark.parametrize("atom", ATOMS)
def test_operands_from_shared_memory(
    atom: str, type_name: str, major: str, m: int, tiles: dict[str, NDArray[np.int64]]
) -> None:
    """Every swizzle and major-ness: two MMAs accumulate over K."""
    bits = TYPES[type_name]
    kind, code_type, code = KINDS[type_name]
    key = f"{atom}.{type_name}.{major}"
    generator = np.random.default_rng(m)
    n, per_k = 128, 256 // bits
    k = tiles[key].size // ROWS
    a, b = _codes(generator, code_type, (m, k)), _codes(generator, code_type, (n, k))
    shared = Shared()
    a_start, b_start = 2048, 64 * 1024
    shared.put(a_start, _padded(a, k), tiles[key], bits)
    shared.put(b_start, b, tiles[key], bits)
    memory = TensorMemory()
    memory.allocate(256)
    mn = major == "MN"
    descriptor = InstructionDescriptor.decode(_idesc(m, n, code, code, a_mn=mn, b_mn=mn), kind)
    assert descriptor.k == per_k
    for step in range(k // per_k):
        tcgen05.mma(
            descriptor,
            [Cta(memory, shared.read)],
            16,
            _descriptor(a_start, tiles[f"{key}.d{step}"], bits),
            _descriptor(b_start, tiles[f"{key}.d{step}"], bits),
            accumulate=step > 0,
        )
    fmt = formats.float_format(code_type)
    expected = fmt.decode(a).astype(np.float64) @ fmt.decode(b).astype(np.float64).T
    np.testing.assert_allclose(_accumulated(memory, m, n), expected, rtol=1e-5, atol=1e-4)
    assert memory.written.sum() == m * n


def _put_scales(memory: TensorMemory, codes: NDArray[np.uint32], column: int, quarters: range = range(4)) -> None:
    """The 32x128b.warpx4 arrangement: row r in lane r % 32, column r / 32, one byte per block of K."""
    cells = (codes.astype(np.uint32) << (8 * np.arange(codes.shape[1], dtype=np.uint32))).sum(axis=1).astype(np.uint32)
    row = np.arange(len(cells))
    for quarter in quarters:
        memory.write(32 * quarter + row % 32, column + row // 32, cells, "test")


@pytest.mark.parametrize("vectors", [4, 2])
@pytest.mark.parametrize(("ctas", "m", "n"), [(1, 128, 64), (1, 128, 192), (2, 256, 128), (2, 128, 128)])
def test_block_scaled_fp4(ctas: int, m: int, n: int, vectors: int, tiles: dict[str, NDArray[np.int64]]) -> None:
    """NVFP4 (4X, UE4M3) and MXFP4 (2X, UE8M0) with one CTA, and with a pair in both data-path arrangements."""
    generator = np.random.default_rng(n)
    a, b = _codes(generator, "e2m1", (m, 256)), _codes(generator, "e2m1", (n, 256))
    scale_type = "ue4m3" if vectors == 4 else "ue8m0"
    low, high = (1, 127) if vectors == 4 else (120, 134)
    a_scale, b_scale = (generator.integers(low, high, (rows, 4 * vectors), dtype=np.uint32) for rows in (m, n))
    pairs = [(TensorMemory(), Shared()) for _ in range(ctas)]
    rows_a, rows_b = m // ctas, n // ctas
    for rank, (memory, shared) in enumerate(pairs):
        memory.allocate(512)
        for start, codes, rows in ((0, a, rows_a), (64 * 1024, b, rows_b)):
            for first in range(0, rows, ROWS):
                tile = codes[rank * rows + first : rank * rows + min(rows, first + ROWS)]
                shared.put(start + 128 * first, _padded(tile, 256), tiles["SW128.float_e2m1_t.K"], 4)
    kind = "mxf4nvf4" if vectors == 4 else "mxf4"
    for step in range(4):
        for rank, (memory, _) in enumerate(pairs):
            block = slice(step * vectors, (step + 1) * vectors)
            # scale_vec::2X may use the upper half of each cell: scale factor id 2.
            shift = 2 * (step % 2) if vectors == 2 else 0

            def padded(codes: NDArray[np.uint32], shift: int = shift) -> NDArray[np.uint32]:
                return np.pad(codes, ((0, 0), (shift, 4 - shift - codes.shape[1])), constant_values=255)

            _put_scales(memory, padded(a_scale[rank * rows_a : (rank + 1) * rows_a, block]), 300)
            if m == 128 and ctas == 2:
                for half in (0, 1):
                    _put_scales(
                        memory,
                        padded(b_scale[half * n // 2 : (half + 1) * n // 2, block]),
                        310,
                        range(2 * half, 2 * half + 2),
                    )
            else:
                _put_scales(memory, padded(b_scale[:, block]), 310)
        extra = (vectors == 2) << 23 | shift << 29 | shift << 4
        descriptor = InstructionDescriptor.decode(_idesc(m, n, 1, 1, 0, extra=extra), kind)
        tcgen05.mma(
            descriptor,
            [Cta(memory, shared.read) for memory, shared in pairs],
            32,
            _descriptor(0, tiles[f"SW128.float_e2m1_t.K.d{step}"], 4),
            _descriptor(64 * 1024, tiles[f"SW128.float_e2m1_t.K.d{step}"], 4),
            accumulate=step > 0,
            scale_vectors=vectors,
            a_scale_address=300,
            b_scale_address=310,
        )
    decode = formats.float_format(scale_type).decode
    left = formats.E2M1.decode(a).astype(np.float64) * np.repeat(decode(a_scale), 64 // vectors, axis=1)
    right = formats.E2M1.decode(b).astype(np.float64) * np.repeat(decode(b_scale), 64 // vectors, axis=1)
    expected = left @ right.T
    tolerance = 1e-6 * (np.abs(left) @ np.abs(right).T).max()
    for rank, (memory, _) in enumerate(pairs):
        mine = expected[rank * rows_a : (rank + 1) * rows_a]
        if rows_a == 64:
            mine = np.concatenate([mine[:, : n // 2], mine[:, n // 2 :]])
        np.testing.assert_allclose(memory.cells[:, 32 : 32 + mine.shape[1]].view(np.float32), mine, atol=tolerance)


def test_cute_agrees_on_scale_factor_and_accumulator_layouts(tmp_path: Path) -> None:
    """lane << 18 | byte for 8-bit factors, lane << 16 | column for the accumulators."""
    shape = "make_shape(make_shape(Int<{}>{{}}, make_shape(Int<16>{{}}, Int<4>{{}})), Int<1>{{}}, Int<1>{{}})"
    body = "using namespace cutlass; " + " ".join(
        f'show("{name}", UMMA::tmem_sf_frg<{parameters}>::make({shape.format(rows)}).layout());'
        for name, parameters, rows in (
            ("sfa", "float_ue4m3_t, 16, 1, true", 128),
            ("sfb", "float_ue4m3_t, 16, 1, false", 192),
            ("sfb2", "float_ue4m3_t, 16, 2, false, UMMA::TmemAllocMode::ScaleFactorDuplicated2by2", 256),
        )
    )
    for name, fragment in (("d64", "tmem_frg_1sm"), ("d2", "tmem_frg_2sm")):
        d_shape = "make_shape(make_shape(Int<64>{}, Int<32>{}), Int<1>{}, Int<1>{})"
        body += f'show("{name}", UMMA::{fragment}<float>::make({d_shape}).layout());'
    layouts = cute_reference.layouts(body, tmp_path)
    for name, rows in (("sfa", 128), ("sfb", 192)):
        # CuTe's coordinates: row % 32, row / 32, replica, element in the block, block of K.
        r, column, replica, _, block = np.unravel_index(np.arange(rows * 4 * 64), (32, rows // 32, 4, 16, 4), order="F")
        np.testing.assert_array_equal(layouts[name].reshape(-1), (r + 32 * replica) << 18 | 4 * column + block)
    r, column, half, replica, _, block = np.unravel_index(np.arange(256 * 2 * 64), (32, 4, 2, 2, 16, 4), order="F")
    np.testing.assert_array_equal(
        layouts["sfb2"].reshape(-1), (r + 64 * half + 32 * replica) << 18 | 4 * column + block
    )
    for part in tcgen05._parts(64, 32, 1, 0):
        rows, columns = np.meshgrid(part.rows, np.arange(32), indexing="ij")
        ours = part.lanes[:, None] << 16 | columns
        np.testing.assert_array_equal(layouts["d64"].reshape(32, 64).T[rows, columns], ours)
    for part in tcgen05._parts(128, 32, 2, 0):
        columns = np.arange(32)[part.columns]
        ours = part.lanes[:, None] << 16 | columns - 16 * part.half
        np.testing.assert_array_equal(layouts["d2"].reshape(32, 64).T[part.rows[:, None], columns], ours)


def test_a_from_tensor_memory_negation_scaling_and_masks(tiles: dict[str, NDArray[np.int64]]) -> None:
    generator = np.random.default_rng(3)
    a, b = _codes(generator, "f16", (128, 16)), _codes(generator, "f16", (64, 16))
    c = generator.normal(size=(128, 64)).astype(np.float32)
    memory, shared = TensorMemory(), Shared()
    memory.allocate(512)
    lanes = np.arange(128)[:, None]
    memory.write(lanes, 200 + np.arange(8), a[:, 0::2] | a[:, 1::2] << np.uint32(16), "test")
    memory.write(lanes, np.arange(64), c.view(np.uint32), "test")
    shared.put(0, _padded(b, 64), tiles["SW128.half_t.K"], 16)
    descriptor = InstructionDescriptor.decode(_idesc(128, 64, extra=1 << 14), "f16")
    tcgen05.mma(
        descriptor,
        [Cta(memory, shared.read)],
        0,
        200,
        _descriptor(0, tiles["SW128.half_t.K.d0"], 16),
        accumulate=True,
        a_in_tensor_memory=True,
        scale_input_d=3,
        disabled_lanes=[0, 0xFFFF0000, 0, 0xFFFFFFFF],
    )
    expected = -(formats.F16.decode(a).astype(np.float64) @ formats.F16.decode(b).astype(np.float64).T) + c / 8.0
    expected[48:64], expected[96:] = c[48:64], c[96:]
    np.testing.assert_allclose(memory.cells[:, :64].view(np.float32), expected, rtol=1e-6, atol=1e-6)


def test_narrow_types_of_f8f6f4_are_padded_in_shared_memory() -> None:
    generator = np.random.default_rng(4)
    a, b = _codes(generator, "e2m1", (128, 32)), _codes(generator, "e3m2", (8, 32))
    shared, memory = Shared(), TensorMemory()
    memory.allocate(32)
    # No swizzle: a group of 16 elements is one 16-byte chunk, 8 rows of chunks follow each other.
    for start, codes, bits in ((0, a, 4), (64 * 1024, b, 6)):
        for row, group in np.ndindex(len(codes), 2):
            value = sum(int(v) << bits * i for i, v in enumerate(codes[row, 16 * group : 16 * group + 16]))
            address = start + row // 8 * 256 + group * 128 + row % 8 * 16
            shared.data[address : address + 16] = np.frombuffer(value.to_bytes(16, "little"), np.uint8)
    descriptor = InstructionDescriptor.decode(_idesc(128, 8, 5, 4), "f8f6f4")
    fields = np.array([128 >> 4, 256 >> 4, 0, 1, 0])
    tcgen05.mma(
        descriptor,
        [Cta(memory, shared.read)],
        0,
        _descriptor(0, fields, 8),
        _descriptor(64 * 1024, fields, 8),
        accumulate=False,
    )
    expected = formats.E2M1.decode(a).astype(np.float64) @ formats.E3M2.decode(b).astype(np.float64).T
    np.testing.assert_array_equal(memory.cells[:, :8].view(np.float32), expected)


@pytest.mark.parametrize(
    "shape", ["128x256b", "128x128b", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23", "32x128b.warpx4"]
)
def test_copies_to_tensor_memory(shape: str) -> None:
    generator = np.random.default_rng(8)
    rows, columns = int(shape.partition("x")[0]), 8 if "256b" in shape else 4
    data = generator.integers(0, 2**32, (rows, columns), dtype=np.uint32)
    memory, shared = TensorMemory(), Shared()
    memory.allocate(64)
    for row, chunk in np.ndindex(rows, columns // 4):
        address = 4096 + row // 8 * 512 + chunk * 128 + row % 8 * 16
        shared.data[address : address + 16] = data[row, 4 * chunk : 4 * chunk + 4].view(np.uint8)
    tcgen05.copy(shape, [Cta(memory, shared.read)], 10, _descriptor(4096, np.array([8, 32, 0, 1, 0]), 8))
    lane = np.arange(128)
    source = {128: lane, 32: lane % 32}.get(rows, lane % 64 if "02_13" in shape else lane // 64 * 32 + lane % 32)
    np.testing.assert_array_equal(memory.cells[:, 10 : 10 + columns], data[source])


def test_a_missing_replica_of_the_scales_is_seen(tiles: dict[str, NDArray[np.int64]]) -> None:
    memory, shared = TensorMemory(), Shared()
    memory.allocate(128)
    _put_scales(memory, np.full((128, 4), 56, np.uint32), 64)
    _put_scales(memory, np.full((64, 4), 56, np.uint32), 72, range(3))
    fields = tiles["SW128.float_e2m1_t.K.d0"]
    with pytest.raises(MemoryFault, match="B's scale factors: tensor memory lane 96"):
        tcgen05.mma(
            InstructionDescriptor.decode(_idesc(128, 64, 1, 1, 0), "mxf4nvf4"),
            [Cta(memory, shared.read)],
            0,
            _descriptor(0, fields, 4),
            _descriptor(0, fields, 4),
            accumulate=False,
            scale_vectors=4,
            a_scale_address=64,
            b_scale_address=72,
        )


@pytest.mark.parametrize(
    ("value", "kind", "error"),
    [
        (_idesc(128, 64, 3), "f16", EmulatorError),
        (_idesc(128, 64) | 4, "f16", UnknownInstructionError),
        (_idesc(128, 64, 1, 1, 0) | 1 << 31, "mxf4nvf4", UnknownInstructionError),
    ],
)
def test_reserved_descriptors(value: int, kind: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        InstructionDescriptor.decode(value, kind)


@pytest.mark.parametrize(("m", "n", "ctas"), [(32, 64, 1), (256, 64, 1), (128, 264, 1), (256, 40, 2)])
def test_shapes_that_do_not_exist(m: int, n: int, ctas: int) -> None:
    with pytest.raises(EmulatorError, match="no shape"):
        InstructionDescriptor.decode(_idesc(m, n), "f16").check(ctas)


def test_scale_modifiers() -> None:
    assert tcgen05.scale_vectors("mxf4nvf4", ["block_scale", "block16"]) == 4
    assert tcgen05.scale_vectors("mxf4nvf4", ["scale_vec::4X"]) == 4
    assert tcgen05.scale_vectors("mxf4", []) == 2
    assert tcgen05.scale_vectors("mxf8f6f4", ["block32"]) == 1
