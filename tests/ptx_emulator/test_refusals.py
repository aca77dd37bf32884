"""Most of what docs/ptx_emulator.md says is refused: each stops with its text, none is executed as something else."""

import re
from pathlib import Path

import pytest

from ptx_emulator.errors import PtxSyntaxError, UnknownInstructionError
from ptx_emulator.hand_written import run
from ptx_emulator.matrix_descriptor import MatrixDescriptor
from ptx_emulator.tcgen05 import InstructionDescriptor

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ptx_emulator.md"
# What the page calls it, and an example.
REFUSED = {
    "indirect calls": ".reg .b64 %rd20; mov.u64 %rd20, kernel; call %rd20, ();",
    "textures and surfaces": "tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f1, %f2}];",
    "`multimem`": "multimem.ld_reduce.relaxed.gpu.global.add.u32 %r9, [%rd1];",
    "`mma` other than m16n8": "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 "
    "{%fd1, %fd2}, {%fd3}, {%fd4}, {%fd1, %fd2};",
    "sparse matrix operations": "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{%f1, %f2, %f3, %f4}, {%r6, %r7}, {%r8, %r9}, {%f1, %f2, %f3, %f4}, %r10, 0;",
    "`tcgen05.shift`": "tcgen05.shift.cta_group::1.down [%r6];",
    "`.ws`": "tcgen05.mma.ws.cta_group::1.kind::f16 [%r6], %rd4, %rd5, %r7, %p1;",
    "`.ashift`": "tcgen05.mma.cta_group::1.kind::f16.ashift [%r6], [%r8], %rd5, %r7, %p1;",
    "im2col tensor maps": "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
    "[%r3], [%rd1, {%r6, %r6, %r6}], [%r3], {%rs1};",
    "directed rounding of f64": "add.rz.f64 %fd1, %fd2, %fd3;",
    "stochastic rounding": "cvt.rs.f16x2.f32 %r6, %f1, %f2, %r7;",
}
DECLARED = ".reg .f32 %f<8>; .reg .f64 %fd<8>; .reg .b16 %rs<4>; "


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    assert what in re.sub(r"\s+", " ", PAGE.read_text())
    with pytest.raises((UnknownInstructionError, PtxSyntaxError)) as refused:
        run(DECLARED + REFUSED[what])
    name = REFUSED[what].split(";")[-2].split()[0]
    assert name.split(".")[0] in str(refused.value)


def test_refused_descriptors() -> None:
    page = re.sub(r"\s+", " ", PAGE.read_text())
    assert "base offsets" in page
    assert "K of 96" in page
    for decode, value in ((MatrixDescriptor.tcgen05, 1 << 46 | 2 << 61), (MatrixDescriptor.wgmma, 1 << 62)):
        with pytest.raises(UnknownInstructionError, match="base offset"):
            decode(value | 1 << 49)
    mxf4 = 128 >> 4 << 24 | 64 >> 3 << 17 | 1 << 7 | 1 << 10
    with pytest.raises(UnknownInstructionError, match="K = 96"):
        InstructionDescriptor.decode(mxf4 | 1 << 31, "mxf4nvf4")
