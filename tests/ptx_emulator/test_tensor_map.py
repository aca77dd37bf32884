"""Box copies against element-by-element definitions, on random tensors with boxes that stick out on every side."""

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ptx_emulator import cute_reference, tensor_map
from ptx_emulator.errors import EmulatorError, UnknownInstructionError
from ptx_emulator.tensor_map import ElementType, Swizzle, TensorMap

BASE = 0x7F0000000000  # a global address far from zero


class Memory:
    """Bounds-checked flat bytes at an address."""

    def __init__(self, data: NDArray[np.uint8], base: int = BASE) -> None:
        self.data, self.base = data, base

    def _index(self, addresses: NDArray[np.uint64], count: int) -> NDArray[np.int64]:
        index = (addresses.astype(np.int64) - self.base)[:, None] + np.arange(count)
        assert index.min() >= 0
        assert index.max() < self.data.size
        return index

    def read(self, addresses: NDArray[np.uint64], count: int) -> NDArray[np.uint8]:
        return self.data[self._index(addresses, count)]

    def write(self, addresses: NDArray[np.uint64], data: NDArray[np.uint8]) -> None:
        self.data[self._index(addresses, data.shape[1])] = data


def _reference_box(tensor: NDArray, coords: tuple[int, ...], tm: TensorMap, fill: object) -> NDArray:
    """tensor has the map's dimensions reversed (dimension 0 last); so has the box returned."""
    box = np.full(tm.counts[::-1], fill, tensor.dtype)
    for index in np.ndindex(*tm.counts):
        source = tuple(
            c + i * (e if d else 1) for d, (c, i, e) in enumerate(zip(coords, index, tm.element_strides, strict=True))
        )
        if all(0 <= s < n for s, n in zip(source, tm.dims, strict=True)):
            box[index[::-1]] = tensor[source[::-1]]
    return box


def _shared_after(tm: TensorMap, coords: tuple[int, ...], memory: Memory, address: int) -> Memory:
    addresses, data = tensor_map.load(tm, coords, address, memory.read)
    shared = Memory(np.full(64 * 1024, 0xEE, np.uint8), 0)
    shared.write(addresses, data)
    return shared


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_loads_of_any_rank_match_the_definition(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 5))
    kind, dtype = data.draw(
        st.sampled_from(
            [
                (ElementType.UINT8, np.uint8),
                (ElementType.BFLOAT16, np.uint16),
                (ElementType.FLOAT32, np.uint32),
                (ElementType.INT64, np.int64),
            ]
        )
    )
    size = np.dtype(dtype).itemsize
    swizzle = data.draw(st.sampled_from([Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128, Swizzle.B128_ATOM_32B]))
    row = {Swizzle.NONE: 16 * data.draw(st.integers(1, 4)), Swizzle.B32: 32, Swizzle.B64: 64}.get(swizzle, 128)
    dims = tuple(data.draw(st.integers(1, 9 if i else 200)) for i in range(rank))
    box = (row // size, *(data.draw(st.integers(1, 4)) for _ in range(rank - 1)))
    steps = tuple(data.draw(st.integers(1, 3)) for _ in range(rank))
    coords = tuple(data.draw(st.integers(-b, d + 2)) for b, d in zip(box, dims, strict=True))
    nan_fill = kind in (ElementType.BFLOAT16, ElementType.FLOAT32) and data.draw(st.booleans())

    pitch = -(-dims[0] * size // 16) * 16 + 16 * data.draw(st.integers(0, 2))
    strides = [pitch]
    for extent in dims[1:]:
        strides.append(strides[-1] * extent)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    storage = generator.integers(0, 256, strides[rank - 1] if rank > 1 else dims[0] * size, dtype=np.uint8)
    tensor = np.lib.stride_tricks.as_strided(
        storage[: dims[0] * size].view(dtype) if rank == 1 else storage.view(dtype),
        dims[::-1],
        (*strides[: rank - 1][::-1], size),
    )
    tm = TensorMap(kind, BASE, dims, tuple(strides[: rank - 1]), box, steps, 0, swizzle, 0, nan_fill)
    assert TensorMap.from_bytes(tm.to_bytes()) == tm

    shared = _shared_after(tm, coords, Memory(storage), 1024)
    linear = 1024 + np.arange(tm.transaction_bytes, dtype=np.uint64)
    seen = shared.read(tensor_map.swizzled(linear, swizzle), 1).reshape(-1).view(dtype).reshape(tm.counts[::-1])
    fill = {2: 0x7FFF, 4: 0x7FFFFFFF}[size] if nan_fill else 0
    np.testing.assert_array_equal(seen, _reference_box(tensor, coords, tm, fill))
    assert (shared.data != 0xEE).sum() <= tm.transaction_bytes

    # Storing the box back changes nothing inside the tensor and touches nothing outside it.
    target = Memory(storage.copy())
    tensor_map.store(tm, coords, 1024, shared.read, target.write)
    np.testing.assert_array_equal(target.data, storage)


def test_swizzles_are_cutes(tmp_path: Path) -> None:
    names = {Swizzle.B32: "1,4,3", Swizzle.B64: "2,4,3", Swizzle.B128: "3,4,3", Swizzle.B128_ATOM_32B: "2,5,2"}
    body = "\n".join(
        f'show("{mode.name}", composition(Swizzle<{bits}>{{}}, Layout<Shape<_4096, _1>>{{}}));'
        for mode, bits in names.items()
    )
    reference = cute_reference.layouts(body, tmp_path)
    for mode in names:
        ours = tensor_map.swizzled(np.arange(4096, dtype=np.uint64), mode)
        np.testing.assert_array_equal(ours, reference[mode.name][:, 0])


def test_four_bit_elements_stay_packed_or_are_padded() -> None:
    generator = np.random.default_rng(5)
    storage = generator.integers(0, 256, 6 * 128, dtype=np.uint8)  # 6 rows of 256 nibbles
    packed = TensorMap(ElementType.U4_ALIGN8, BASE, (256, 6), (128,), (64, 2), (1, 1), 0, Swizzle.B32)
    shared = _shared_after(packed, (64, 3), Memory(storage), 256)
    linear = tensor_map.swizzled(np.arange(256, 256 + 64, dtype=np.uint64), Swizzle.B32)
    np.testing.assert_array_equal(shared.read(linear, 1).reshape(2, 32), storage.reshape(6, 128)[3:5, 32:64])
    assert packed.transaction_bytes == 64

    padded = TensorMap(ElementType.U4_ALIGN16, BASE, (256, 6), (128,), (128, 2), (1, 1), 0, Swizzle.B128)
    shared = _shared_after(padded, (128, 5), Memory(storage), 1024)
    linear = tensor_map.swizzled(np.arange(1024, 1024 + 256, dtype=np.uint64), Swizzle.B128)
    rows = shared.read(linear, 1).reshape(2, 8, 16)
    np.testing.assert_array_equal(rows[0, :, :8].reshape(-1), storage.reshape(6, 128)[5, 64:])
    assert not rows[1].any()  # row 6 lies outside
    assert padded.transaction_bytes == 128
    with pytest.raises(EmulatorError, match="loads only"):
        tensor_map.store(padded, (0, 0), 1024, shared.read, shared.write)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(ElementType.FLOAT32, np.float32), (ElementType.BFLOAT16, ml_dtypes.bfloat16), (ElementType.INT32, np.int32)],
)
@pytest.mark.parametrize("operation", ["add", "min", "max"])
def test_reductions(kind: ElementType, dtype: type, operation: str) -> None:
    generator = np.random.default_rng(9)
    old, new = (generator.normal(size=(5, 16)).astype(np.float32) * 50 for _ in range(2))
    old, new = old.astype(dtype), new.astype(dtype)
    memory = Memory(old.copy().view(np.uint8).reshape(-1))
    shared = Memory(np.zeros(4096, np.uint8), 0)
    row = 16 * np.dtype(dtype).itemsize
    shared.data[128 : 128 + 5 * row] = new.view(np.uint8).reshape(-1)
    tm = TensorMap(kind, BASE, (16, 5), (row,), (16, 4), (1, 1))
    written = tensor_map.store(tm, (0, 2), 128, shared.read, memory.write, memory.read, operation)
    expected = old.copy()
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[operation]
    expected[2:] = function(old[2:], new[:3])
    np.testing.assert_array_equal(memory.data.view(dtype).reshape(5, 16), expected)
    assert written == 3 * row


def test_gather_reads_four_rows() -> None:
    storage = np.random.default_rng(2).integers(0, 256, 10 * 32, dtype=np.uint8)
    tm = TensorMap(ElementType.UINT8, BASE, (32, 10), (32,), (32, 1), (1, 1))
    _, data = tensor_map.load(tm, (0, 0), 0, Memory(storage).read, gather=(7, 2, 11, 0))
    rows = storage.reshape(10, 32)
    np.testing.assert_array_equal(data.reshape(4, 32), [rows[7], rows[2], np.zeros(32), rows[0]])


def test_replaced_fields_are_checked_on_use() -> None:
    tm = TensorMap(ElementType.UINT8, BASE, (32, 10), (32,), (32, 1), (1, 1))
    data = tm.to_bytes()
    for field, value, ordinal in (("global_address", BASE + 64, 0), ("global_dim", 7, 1), ("global_stride", 40, 0)):
        data = tensor_map.replace(data, field, value, ordinal)
    with pytest.raises(EmulatorError, match="strides"):
        TensorMap.from_bytes(data)
    data = tensor_map.replace(tensor_map.replace(data, "global_stride", 48), "rank", 1)
    assert TensorMap.from_bytes(data) == TensorMap(ElementType.UINT8, BASE + 64, (32, 7), (48,), (32, 1), (1, 1))
    with pytest.raises(UnknownInstructionError, match="colour"):
        tensor_map.replace(data, "colour", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": BASE + 8}, "address"),
        ({"strides": (40,)}, "strides"),
        ({"box": (257, 1)}, "box"),
        ({"box": (24, 1)}, "16 bytes"),
        ({"interleave": 1}, "interleave"),
        ({"swizzle": Swizzle.B32, "box": (64, 1)}, "swizzle"),
        ({"nan_fill": True}, "NaN"),
    ],
)
def test_the_encoder_keeps_the_drivers_rules(change: dict[str, object], message: str) -> None:
    good = {
        "element_type": ElementType.UINT8,
        "address": BASE,
        "dims": (64, 10),
        "strides": (64,),
        "box": (32, 1),
        "element_strides": (1, 1),
    }
    TensorMap(**good)  # type: ignore[arg-type]
    with pytest.raises(EmulatorError, match=message):
        TensorMap(**{**good, **change})  # type: ignore[arg-type]


def test_what_is_not_modelled_is_refused() -> None:
    tm = TensorMap(ElementType.UINT8, BASE, (64, 10), (64,), (64, 1), (1, 1), 0, Swizzle.B128)
    memory = Memory(np.zeros(640, np.uint8))
    with pytest.raises(UnknownInstructionError, match="64 bytes, not 128"):
        tensor_map.load(tm, (0, 0), 1024, memory.read)
    for first, second in itertools.pairwise([b"\0" * 128, b"\1" * 128]):
        with pytest.raises(EmulatorError, match="tensor map"):
            TensorMap.from_bytes(first + second)
