"""CUTLASS's NVFP4 example GEMMs, taken from the nvidia-cutlass package and run through the runtime shim.

The example's kernel definition is compiled as it is (tile and cluster shapes may be replaced); its host program, which
fills, verifies and times, is cut off and replaced by one function that runs its `Gemm` on the caller's buffers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptx_emulator import formats
from ptx_emulator.errors import EmulatorError
from ptx_emulator.shim import Gpu, Program
from ptx_emulator.shim.toolkit import cutlass_includes

EXAMPLES = {
    "72a": "72_blackwell_narrow_precision_gemm/72a_blackwell_nvfp4_bf16_gemm.cu",
    "79a": "79_blackwell_geforce_gemm/79a_blackwell_geforce_nvfp4_bf16_gemm.cu",
}

_RUN = """
#include "cutlass/util/device_memory.h"

extern "C" int run_gemm(int m, int n, int k, void* a, void* sfa, void* b, void* sfb, void* c, void* d,
                        float alpha, float beta) {
    using Config = typename Gemm::GemmKernel::CollectiveMainloop::Sm1xxBlkScaledConfig;
    auto const problem = cute::make_shape(m, n, k, 1);
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {m, n, k, 1},
        {static_cast<ElementA::DataType*>(a), cutlass::make_cute_packed_stride(StrideA{}, {m, k, 1}),
         static_cast<ElementB::DataType*>(b), cutlass::make_cute_packed_stride(StrideB{}, {n, k, 1}),
         static_cast<ElementA::ScaleFactorType*>(sfa), Config::tile_atom_to_shape_SFA(problem),
         static_cast<ElementB::ScaleFactorType*>(sfb), Config::tile_atom_to_shape_SFB(problem)},
        {{alpha, beta},
         static_cast<ElementC*>(c), cutlass::make_cute_packed_stride(StrideC{}, {m, n, 1}),
         static_cast<ElementD*>(d), cutlass::make_cute_packed_stride(StrideD{}, {m, n, 1})}};
    Gemm gemm;
    cutlass::device_memory::allocation<uint8_t> workspace(Gemm::get_workspace_size(arguments));
    if (gemm.can_implement(arguments) != cutlass::Status::kSuccess) return 1;
    if (gemm.initialize(arguments, workspace.get()) != cutlass::Status::kSuccess) return 2;
    if (gemm.run() != cutlass::Status::kSuccess) return 3;
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 4;
}
"""


def example_source(name: str, replacements: dict[str, str]) -> str:
    """The text of an example plus `run_gemm`; each replaced text must occur."""
    text = (cutlass_includes()[0].parent / "examples" / EXAMPLES[name]).read_text()
    for old, new in replacements.items():
        if old not in text:
            raise EmulatorError(f"example {name} does not contain {old!r}")
        text = text.replace(old, new)
    head, found, _ = text.partition("//\n// Data members\n//")
    if not found:
        raise EmulatorError(f"example {name} does not have the layout of CUTLASS 4")
    lines = [line for line in head.splitlines() if "/util/reference/" not in line and "/util/host_tensor" not in line]
    return "\n".join(lines) + "\n#endif\n" + _RUN


def compile_example(name: str, gpu: Gpu, replacements: dict[str, str]) -> Program:
    return Program.compile(example_source(name, replacements), gpu, includes=cutlass_includes())


def tile_scales(scales: NDArray[np.uint8], padding: int = 0) -> NDArray[np.uint8]:
    """[rows, blocks] scale codes in the 128x4 tiled order; `padding` is the code beyond them."""
    rows, blocks = scales.shape
    padded = np.full((-(-rows // 128) * 128, -(-blocks // 4) * 4), padding, np.uint8)
    padded[:rows, :blocks] = scales
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)


@dataclass(frozen=True)
class Problem:
    """Random NVFP4 operands and what they mean in float64."""

    m: int
    n: int
    k: int
    seed: int
    scale_padding: int = 0

    def operand(self, rows: int, stream: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float64]]:
        """(packed codes [rows, k/2], tiled scale codes, values [rows, k])."""
        random = np.random.default_rng((self.seed, stream))
        codes = random.integers(0, 16, (rows, self.k), np.uint8)
        scales = random.integers(0x20, 0x48, (rows, self.k // 16), np.uint8)
        values = formats.E2M1.decode(codes).astype(np.float64)
        values *= np.repeat(formats.UE4M3.decode(scales).astype(np.float64), 16, axis=1)
        return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4), tile_scales(scales, self.scale_padding), values

    def run(
        self, program: Program, alpha: float = 1.0, beta: float = 0.0
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(result, float64 reference), both [m, n]; raises what stops the kernel."""
        a, sfa, left = self.operand(self.m, 0)
        b, sfb, right = self.operand(self.n, 1)
        c = np.random.default_rng((self.seed, 2)).normal(size=(self.m, self.n)).astype(np.float32)
        c_codes = formats.BF16.encode(c).astype(np.uint16)
        d = np.zeros((self.m, self.n), np.uint16)
        status = program.call("run_gemm", self.m, self.n, self.k, a, sfa, b, sfb, c_codes, d, alpha, beta)
        if status:
            raise EmulatorError(f"run_gemm returned {status}")
        reference = alpha * (left @ right.T) + beta * formats.BF16.decode(c_codes).astype(np.float64)
        return formats.BF16.decode(d).astype(np.float64), reference
