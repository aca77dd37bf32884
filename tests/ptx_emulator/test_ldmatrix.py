"""`ldmatrix` and `stmatrix` against CuTe's copy atoms and the element rules of the PTX ISA."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ptx_emulator import cute_reference, ldmatrix


class Shared:
    """A flat memory whose rows of 16 bytes lie in shuffled order, so that the addresses matter."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.data = generator.integers(0, 256, 64 * 16, dtype=np.uint8)
        self.addresses = (generator.permutation(64)[:32] * 16).astype(np.uint64)

    def read(self, addresses: NDArray[np.uint64], count: int) -> NDArray[np.uint8]:
        return self.data[addresses.astype(np.int64)[:, None] + np.arange(count)]

    def write(self, addresses: NDArray[np.uint64], data: NDArray[np.uint8]) -> None:
        self.data[addresses.astype(np.int64)[:, None] + np.arange(data.shape[1])] = data

    def rows(self) -> NDArray[np.uint8]:
        return self.read(self.addresses, 16)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_b16_matrices(count: int) -> None:
    shared = Shared(count)
    matrices = shared.rows()[: 8 * count].reshape(count, 8, 16).view(np.uint16).astype(int)
    plain = ldmatrix.load(shared.addresses, shared.read, count=count)
    transposed = ldmatrix.load(shared.addresses, shared.read, count=count, transposed=True)
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        for i in range(count):
            assert plain[i, lane] == matrices[i, row, column] | matrices[i, row, column + 1] << 16
            assert transposed[i, lane] == matrices[i, column, row] | matrices[i, column + 1, row] << 16


@pytest.fixture(scope="module")
def atoms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[np.int64]]:
    body = []
    for name in ("SM100_U8x8_LDSM_T", "SM100_U8x16_LDSM_T", "SM100_SU4_DU8x16_x4_LDSM_N", "SM100_U8x16_STSM_T"):
        body += [f'show("{name}.{side}", Copy_Traits<{name}>::{side}Layout{{}});' for side in ("Src", "Dst")]
    return cute_reference.layouts("\n".join(body), tmp_path_factory.mktemp("cute"))


@pytest.mark.parametrize(("atom", "count"), [("SM100_U8x8_LDSM_T", 1), ("SM100_U8x16_LDSM_T", 2)])
def test_transposed_bytes_match_cute(atom: str, count: int, atoms: dict[str, NDArray[np.int64]]) -> None:
    shared = Shared(7)
    bits = np.full(4096, 255, np.uint8)
    source = atoms[f"{atom}.Src"][: 16 * count, ::8]
    bits[source] = shared.rows()[: 16 * count]
    expected = bits[atoms[f"{atom}.Dst"][:, ::8]]  # [lane, byte], in the order the atom hands registers on
    raw = ldmatrix.load(shared.addresses, shared.read, "m16n16", count, transposed=True)
    as_bytes = np.ascontiguousarray(raw.T).view(np.uint8).reshape(32, count, 2, 2, 2)
    # The atom regroups the instruction's registers: its register i holds byte pair i of both.
    np.testing.assert_array_equal(as_bytes.transpose(0, 1, 3, 2, 4).reshape(32, -1), expected)


def test_narrow_elements_are_expanded_to_bytes(atoms: dict[str, NDArray[np.int64]]) -> None:
    shared = Shared(3)
    layout = atoms["SM100_SU4_DU8x16_x4_LDSM_N.Dst"][:, ::8] // 8
    rows = shared.rows()
    nibbles = np.stack([rows[:, :8] & 15, rows[:, :8] >> 4], axis=2).reshape(32, 16)
    loaded = ldmatrix.load(shared.addresses, shared.read, "m8n16", 4, source_format="b4x16_p64")
    np.testing.assert_array_equal(np.ascontiguousarray(loaded.T).view(np.uint8), nibbles.reshape(-1)[layout])
    loaded = ldmatrix.load(shared.addresses, shared.read, "m8n16", 4, source_format="b6x16_p32")
    sixes = [[int.from_bytes(row[:12].tobytes(), "little") >> 6 * i & 63 for i in range(16)] for row in rows]
    np.testing.assert_array_equal(
        np.ascontiguousarray(loaded.T).view(np.uint8), np.array(sixes, np.uint8).reshape(-1)[layout]
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_undoes_ldmatrix(count: int, transposed: bool) -> None:
    source, target = Shared(1), Shared(2)
    registers = ldmatrix.load(source.addresses, source.read, count=count, transposed=transposed)
    ldmatrix.store(target.addresses, registers, target.write, transposed=transposed)
    np.testing.assert_array_equal(target.rows()[: 8 * count], source.rows()[: 8 * count])


def test_transposed_byte_store_matches_cute(atoms: dict[str, NDArray[np.int64]]) -> None:
    shared = Shared(5)
    registers = np.random.default_rng(0).integers(0, 2**32, (4, 32), dtype=np.uint32)
    bits = np.zeros(4096, np.uint8)
    bits[atoms["SM100_U8x16_STSM_T.Src"][:, ::8]] = np.ascontiguousarray(registers.T).view(np.uint8)
    ldmatrix.store(shared.addresses, registers, shared.write, "m16n8", transposed=True)
    np.testing.assert_array_equal(shared.rows(), bits[atoms["SM100_U8x16_STSM_T.Dst"][:, ::8]])
