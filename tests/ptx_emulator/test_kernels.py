"""CUDA C++ kernels compiled by nvcc, run through the runtime shim, against numpy."""

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptx_emulator import formats
from ptx_emulator.shim import Gpu, Program

SOURCE = Path(__file__).parent / "kernels" / "basics.cu"


@pytest.fixture(scope="module")
def program() -> Program:
    return Program.compile(SOURCE, Gpu("b200"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def words(rng: np.random.Generator, count: int) -> Any:
    return rng.integers(0, 2**32, count, dtype=np.uint32)


def test_reduction_with_partial_warps(program: Program, rng: np.random.Generator) -> None:
    x, result = rng.normal(size=1003).astype(np.float32), np.zeros(1, np.float32)
    assert program.call("sum", x, result, 1003) == 0
    assert result[0] == pytest.approx(x.astype(np.float64).sum(), abs=1e-3)


def test_divergent_lanes_meet_again(program: Program, rng: np.random.Generator) -> None:
    x, steps = rng.integers(1, 2000, 201).astype(np.uint32), np.zeros(201, np.uint32)

    def reference(value: int) -> int:
        n = 0
        while value != 1:
            value = 3 * value + 1 if value & 1 else value // 2
            n += 1
            if n > 60:
                break
        return [n + 7, n ^ 3, n * 2, n.bit_count(), n - 1][value % 5]

    assert program.call("collatz", x, steps, 201) == 0
    np.testing.assert_array_equal(steps, [reference(int(v)) for v in x])


def test_call_local_array_and_constants(program: Program, rng: np.random.Generator) -> None:
    x, out = words(rng, 96), np.zeros(96, np.uint32)
    rounds = [0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834]

    def mix(values: list[int], seed: int) -> int:
        for i, value in enumerate(values):
            seed = ((seed ^ value) * rounds[i % 4] + (seed >> 7)) & 0xFFFFFFFF
        return seed

    def reference(thread: int) -> int:
        local = [0] * 8
        for i in range(8):
            local[(i * 5 + thread) % 8] = (int(x[thread]) + i) & 0xFFFFFFFF
        return mix(local[: 3 + thread % 6], thread) ^ mix(local[1:3], 9)

    assert program.call("mix", x, out) == 0
    np.testing.assert_array_equal(out, [reference(t) for t in range(96)])


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _integer_row(x: int, y: int) -> list[int]:
    u, v = _signed(x, 32), _signed(y, 32)
    ux, uy, uu, uv = x % 2**64, y % 2**64, u % 2**32, v % 2**32

    def quotient(a: int, b: int) -> int:
        return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

    pool = uu.to_bytes(4, "little") + uv.to_bytes(4, "little")
    selector = (x >> 40) & 0x7777
    permuted = int.from_bytes(bytes(pool[selector >> 4 * i & 7] for i in range(4)), "little")
    shift = (y >> 48) & 31
    selected = [pool[x >> 40 + 4 * i & 7] for i in range(4)]
    signs = [x >> 40 + 4 * i & 8 for i in range(4)]
    with_signs = bytes((b >> 7) * 255 if sign else b for b, sign in zip(selected, signs, strict=True))
    dot = sum(_signed(uu >> 8 * i, 8) * _signed(uv >> 8 * i, 8) for i in range(4))

    def dot_half(first: int, *, signed: bool) -> int:
        terms = ((uu >> 16 * i & 0xFFFF, uv >> 8 * (first + i) & 0xFF) for i in range(2))
        return sum(_signed(a, 16) * _signed(b, 8) if signed else a * b for a, b in terms)

    return [
        x * y,
        quotient(x, y),
        0 if y == 0 else x - quotient(x, y) * y,
        x * y >> 64,
        ux * uy >> 64,
        u * v >> 32,
        _signed(quotient(u, v), 32),
        ux >> (y & 63),
        x >> (y & 63),
        32 - uu.bit_length(),
        int(f"{uu:032b}"[::-1], 2),
        permuted,
        ((uv << 32 | uu) << shift >> 32) & 0xFFFFFFFF,
        dot + 5,
        int(float(x)),
        (x & -x).bit_length() + uy.bit_count() + _signed(max(u, v) - min(u, v), 32),
        dot_half(0, signed=True) + 7,
        dot_half(2, signed=True) + 7,
        dot_half(2, signed=False) + 7,
        int.from_bytes(with_signs, "little"),
    ]


def test_integer_arithmetic(program: Program, rng: np.random.Generator) -> None:
    a = rng.integers(-(2**63), 2**63, 256)
    b = rng.integers(-(2**63), 2**63, 256) >> rng.integers(0, 63, 256)
    a[:6], b[:6] = [0, -1, 1, 2**62, -7, 5], [0, 1, -1, 3, 2, 0]
    out = np.zeros((256, 20), np.int64)
    assert program.call("integers", a, b, out) == 0
    expected = [[_signed(v, 64) for v in _integer_row(int(x), int(y))] for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(out, expected)


def test_votes_and_partial_masks(program: Program, rng: np.random.Generator) -> None:
    x, out = words(rng, 128), np.zeros(128, np.uint32)
    assert program.call("votes", x, out) == 0
    count = int(np.count_nonzero(x & 4))
    for warp in range(4):
        lanes = [int(v) for v in x[32 * warp : 32 * warp + 32]]
        ballot = sum((v & 1) << i for i, v in enumerate(lanes))
        taken = [v for v in lanes if v & 2]
        for lane, value in enumerate(lanes):
            match = sum(1 << i for i, v in enumerate(lanes) if v % 5 == value % 5)
            expected = (ballot + match) & 0xFFFFFFFF
            expected ^= (sum(lanes) & 0xFFFFFFFF) ^ max(lanes)
            if value & 2:
                expected += len(taken) + taken[0]
            assert int(out[32 * warp + lane]) == (expected + count) & 0xFFFFFFFF


def test_atomics(program: Program, rng: np.random.Generator) -> None:
    x = words(rng, 128)
    counts, extremes = np.zeros(16, np.uint32), np.array([0, 2**32 - 1, 0], np.uint32)
    assert program.call("atomics", x, counts, extremes) == 0
    np.testing.assert_array_equal(counts, np.bincount(x % 16, minlength=16))
    np.testing.assert_array_equal(extremes, [x.max(), x.min(), np.bitwise_xor.reduce(x)])


@pytest.mark.parametrize("k", [16, 80])
def test_cp_async_pipeline_and_mma(program: Program, rng: np.random.Generator, k: int) -> None:
    a, b = (formats.BF16.encode(rng.normal(size=(rows, k))).astype(np.uint16) for rows in (16, 8))
    c = np.zeros((16, 8), np.float32)
    assert program.call("gemm", a, b, c, k) == 0
    left, right = (formats.BF16.decode(m).astype(np.float64) for m in (a, b))
    np.testing.assert_allclose(c, left @ right.T, rtol=1e-5, atol=1e-5)


def test_float_functions(program: Program, rng: np.random.Generator) -> None:
    x = np.concatenate([rng.normal(size=200), rng.normal(size=55) * 20, [0.0]]).astype(np.float32)
    out = np.zeros((256, 8), np.float32)
    assert program.call("maths", x, out) == 0
    wide = x.astype(np.float64)
    expected = [
        np.exp(wide),
        np.log(np.abs(wide) + 0.5),
        np.tanh(wide),
        1 / np.sqrt(wide**2 + 1),
        np.array([math.erf(v) for v in wide]),
        (wide * np.float64(np.float32(3.0000002)) - wide).astype(np.float32),
        x / np.float32(3.1),
        formats.BF16.decode(formats.BF16.encode(x)),
    ]
    for column, values in enumerate(expected):
        tolerance = 0 if column >= 5 else 3e-6
        np.testing.assert_allclose(
            out[:, column], values, rtol=tolerance, atol=tolerance / 10, err_msg=f"column {column}"
        )


def test_cluster_shared_memory(program: Program, rng: np.random.Generator) -> None:
    x, out = words(rng, 8 * 64), np.zeros(8 * 64, np.uint32)
    assert program.call("neighbours", x, out) == 0
    cells = x.reshape(2, 4, 64)
    np.testing.assert_array_equal(out.reshape(2, 4, 64), cells + np.roll(np.roll(cells, -1, axis=1), -1, axis=2))


@pytest.mark.timeout(60)  # it would wait for ever
def test_copies_arrive_beside_a_warp_that_waits_in_a_loop(program: Program, rng: np.random.Generator) -> None:
    x, flags, out = rng.integers(1, 2**32, 32, dtype=np.uint32), np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    assert program.call("hand_over", x, flags, out) == 0
    np.testing.assert_array_equal(flags, x)
    np.testing.assert_array_equal(out, x)
