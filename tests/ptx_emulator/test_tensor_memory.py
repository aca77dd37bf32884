"""Tensor memory: fragments against CuTe's copy atoms, allocation, and what a kernel may not do."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ptx_emulator import cute_reference, tensor_memory
from ptx_emulator.errors import EmulatorError, MemoryFault
from ptx_emulator.tensor_memory import TensorMemory

# PTX shape, CuTe's name for its lanes and bits, the lanes it covers, columns per repetition.
SHAPES = {"32x32b": ("32dp32b", 32, 1), "16x64b": ("16dp64b", 16, 2), "16x128b": ("16dp128b", 16, 4)}
SHAPES |= {"16x256b": ("16dp256b", 16, 8), "16x32bx2": ("16dp32b", 16, 2)}
COUNTS = (1, 2, 8)


@pytest.fixture(scope="module")
def atoms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[np.int64]]:
    body = [
        f'show("{name}{count}x", Copy_Traits<SM100_TMEM_LOAD_{name}{count}x>::DstLayout{{}});'
        for name, _, _ in SHAPES.values()
        for count in COUNTS
    ]
    return cute_reference.layouts("\n".join(body), tmp_path_factory.mktemp("cute"))


def _filled(generator: np.random.Generator) -> TensorMemory:
    memory = TensorMemory()
    memory.allocate(512)
    memory.cells[:] = generator.integers(0, 2**32, memory.cells.shape, dtype=np.uint32)
    memory.written[:] = True
    return memory


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fragments_match_cute(shape: str, count: int, atoms: dict[str, NDArray[np.int64]]) -> None:
    name, lanes, span = SHAPES[shape]
    width = 32 * span * count  # bits of a lane that the atom moves
    bits = atoms[f"{name}{count}x"][:, ::32]
    memory = _filled(np.random.default_rng(count))
    warp, column = 6, 40
    loaded = memory.load(64 << 16 | column, warp, shape, count, split=count)
    np.testing.assert_array_equal(loaded.T, memory.cells[64 + bits // width, column + bits % width // 32])
    assert bits.max() // width == lanes - 1

    other = TensorMemory()
    other.allocate(512)
    other.store(64 << 16 | column, warp, shape, count, loaded, split=count)
    region = np.s_[64 : 64 + lanes, column : column + span * count]
    np.testing.assert_array_equal(other.cells[region], memory.cells[region])
    assert other.written.sum() == lanes * span * count


def test_packing_joins_two_16_bit_columns() -> None:
    memory = _filled(np.random.default_rng(1))
    loaded = memory.load(8, 0, "32x32b", 4, pack=True)
    for register in range(4):
        low, high = memory.cells[:32, 8 + 2 * register], memory.cells[:32, 9 + 2 * register]
        np.testing.assert_array_equal(loaded[register], low & 0xFFFF | high << 16)
    memory.store(100, 0, "32x32b", 4, loaded, unpack=True)
    np.testing.assert_array_equal(memory.cells[:32, 100:108], memory.cells[:32, 8:16] & 0xFFFF)


def test_allocation() -> None:
    memory = TensorMemory()
    first, second = memory.allocate(256), memory.allocate(128)
    assert (first, second) == (0, 256)
    assert memory.allocate(256) is None
    memory.free(0, 256)
    assert memory.allocate(64) == 0
    with pytest.raises(MemoryFault, match="dealloc"):
        memory.free(256, 64)
    with pytest.raises(EmulatorError, match="power of two"):
        memory.allocate(48)
    memory.may_allocate = False
    with pytest.raises(EmulatorError, match="relinquish"):
        memory.allocate(32)


def test_faults() -> None:
    memory = TensorMemory()
    memory.allocate(32)
    with pytest.raises(MemoryFault, match="never written"):
        memory.load(0, 0, "32x32b", 1)
    with pytest.raises(MemoryFault, match="warp 1 may start at lane 32"):
        memory.load(0, 1, "32x32b", 1)
    with pytest.raises(MemoryFault, match="not allocated"):
        memory.store(31, 0, "32x32b", 2, np.zeros((2, 32), np.uint32))
    memory.store(0, 0, "32x32b", 32, np.ones((32, 32), np.uint32))
    memory.free(0, 32)
    memory.allocate(32)
    with pytest.raises(MemoryFault, match="never written"):  # a new allocation holds nothing
        memory.load(0, 0, "32x32b", 1)
    assert tensor_memory.LANES == 128
