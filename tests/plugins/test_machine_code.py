"""The libraries hold the tensor-core instructions that their kernels are for."""

import re
from pathlib import Path

import pytest
from compiled import THOR, compiled

from trt_nvfp4.plugins.compile.toolchain import ToolchainError, find_cutlass

# A scale per 16 values, which is NVFP4: mma.sync's instruction and tcgen05's, which SM103 spells otherwise.
BLOCK_SCALED = {
    "sm_100a": r"UTCOMMA\S*\.4X",
    "sm_103a": r"UTCOMMA\S*\.BLOCK16",
    THOR: r"UTCOMMA\S*\.4X",
    "sm_120a": r"OMMA\.SF\S*E2M1\.E2M1\.UE4M3\.4X",
    "sm_121a": r"OMMA\.SF\S*E2M1\.E2M1\.UE4M3\.4X",
}


@pytest.mark.slow
def test_fp8_instructions() -> None:
    """wgmma on E4M3 in every FP8 kernel of Hopper, no call that would make it wait, nothing spilled."""
    library = compiled("sm_90a")
    sass = library.sass("sm90_fp8_*.cu")
    kernels = [text for text in sass.split("Function : ") if "Fp8Kernel" in text.splitlines()[0]]
    assert len(kernels) == 9 + 4  # of MLPs and of experts
    assert all(len(re.findall(r"QGMMA\S*E4M3\.E4M3", kernel)) >= 4 for kernel in kernels)
    assert "C7510" not in library.report
    for kernel in kernels:
        first, last = kernel.index("QGMMA"), kernel.rindex("QGMMA")
        assert not re.search(r"\bCALL\b", kernel[first:last]), "the main loop calls"
        assert not re.search(r"\b(?:LDL|STL)\b", kernel)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_89", "sm_120a"])
def test_fp8_instructions_without_wgmma(arch: str) -> None:
    """mma.sync on E4M3 that is one instruction, not a conversion to 16 bits."""
    sass = compiled(arch).sass("sm89_fp8.cu")
    kernels = [text for text in sass.split("Function : ") if "fp8_gemm" in text.splitlines()[0]]
    assert len(kernels) == 4
    assert all(len(re.findall(r"QMMA\.16832\.F32\.E4M3\.E4M3", kernel)) >= 32 for kernel in kernels)
    assert not any(re.search(r"\b(?:LDL|STL)\b", kernel) for kernel in kernels)


@pytest.mark.slow
@pytest.mark.parametrize("arch", BLOCK_SCALED)
def test_block_scaled_instructions(arch: str) -> None:
    sass = compiled(arch).sass("sm1?0_w4a4*.cu")
    instructions = re.findall(BLOCK_SCALED[arch], sass)
    # Dense and gated, and for SM100 and SM103 by one CTA and by two; the assembler unrolls as it likes.
    assert len(instructions) >= 4
    experts = [text for text in sass.split("Function : ") if "ExpertsKernel" in text.splitlines()[0]]
    assert len(experts) == 1
    assert re.search(BLOCK_SCALED[arch], experts[0])


def instructions(ptx: str) -> dict[str, list[str]]:
    """Of every kernel, without what says for which architecture, from which lines and on which machine."""
    text = re.sub(r"^\s*\.section.*?^\s*\}", "", ptx, flags=re.MULTILINE | re.DOTALL)
    # A bool is loaded with the sign of the host's char; names of a file's own symbols hold hashes of its text; labels
    # and strings are numbered throughout a file.
    text = re.sub(r"(?<=_)[0-9a-f]{8}(?=_|\d)", "", text.replace(".s8", ".u8"))
    text = re.sub(r"(?<=\$L__BB)\d+|(?<=\$str\$)\d+|(?<=\b__unnamed_)\d+", "", text)
    # A kernel ends where the next one, or the dump of another object, begins.
    start = r"^(?:\.weak |\.visible )?\.entry "
    kernels = re.findall(rf"{start}.*?(?={start}|^Fatbin|\Z)", text, re.MULTILINE | re.DOTALL)
    assert kernels
    lines = [re.findall(r"^\s*((?!\.loc|\.file|//)\S.*)", kernel, re.MULTILINE) for kernel in kernels]
    return {each[0]: each for each in lines}


@pytest.mark.nightly
@pytest.mark.slow
def test_thors_ptx_is_that_of_b200() -> None:
    """So what the emulator runs as B200 is what Thor's library holds of W4A4."""
    sources = ("linear.cu", "mlp.cu", "moe.cu", "moe_plan.cu", "quantize.cu", "w4a4_moe.cu", "sm100_w4a4*.cu")
    for source in sources:
        ours, theirs = (instructions(compiled(gpu).ptx(source)) for gpu in (THOR, "sm_100a"))
        assert {name: theirs.get(name) for name in ours} == ours, source
        # Thor's library is compiled without pairs of CTAs: dense, plain and gated.
        assert len(theirs) - len(ours) == (3 if "sm100_w4a4" in source else 0)


def test_missing_cutlass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTLASS_DIR", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"CUTLASS_DIR=.* holds no CUTLASS"):
        find_cutlass()
    monkeypatch.delenv("CUTLASS_DIR")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match="pip install nvidia-cutlass"):
        find_cutlass()


def test_old_cutlass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define CUTLASS_MAJOR 3\n#define CUTLASS_MINOR 9\n")
    monkeypatch.setenv("CUTLASS_DIR", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"is CUTLASS 3\.9, 4\.2 or newer is needed"):
        find_cutlass()


#: How far behind a wait for wgmma the compiler puts the arrival that gives back what wgmma has read.
BEHIND_WAIT = 10


def reads_under_way(kernel: str, window: int) -> list[str]:
    """Arrivals of threads on a barrier with a read of shared memory at most `window` instructions before them whose
    result nothing has used: such a read may still be under way, and an arrival does not wait for it. Reads under a
    condition do not count: by these a warp has the first codes of the slot behind the one that it gives back; nor do
    arrivals at all blocks of a cluster, or under a condition behind a wait for wgmma and no read since, which give back
    panels that no thread reads, but wgmma."""
    found: list[str] = []
    waited = -BEHIND_WAIT - 1  # where wgmma was waited for
    unused: dict[int, set[int]] = {}  # by the instruction's place: the registers that it reads into
    for place, text in enumerate(re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", kernel)):
        name, _, rest = re.sub(r"^@!?U?P\d+ ", "", text).partition(" ")
        operands = rest.split(",")
        stores = name.startswith(("ST", "SYNCS", "ATOMS", "RED"))
        # A register of an operand stands for up to four in a row.
        sources = ",".join(operands if stores else operands[1:])
        used = {int(first) + i for first in re.findall(r"\bR(\d+)\b", sources) for i in range(4)}
        unused = {at: registers for at, registers in unused.items() if not registers & used and place - at <= window}
        if name.startswith("WARPGROUP.DEPBAR"):
            waited = place
        of_wgmma = text.startswith("@") and place - waited <= BEHIND_WAIT
        if re.match(r"SYNCS\.ARRIVE\.(?!.*RED).*A1T0", name) and unused and not of_wgmma:
            found.append(text)
        certain = re.fullmatch(r"(?:LDS|LDSM)\b.*", name) and not text.startswith("@")
        read = certain and re.match(r"R(\d+)", operands[0].strip())
        if read:
            waited = -BEHIND_WAIT - 1
            width = 4 if ".128" in name or name.endswith(".4") else 2 if ".64" in name else 1
            unused[place] = {int(read[1]) + i for i in range(width)}
    return found


ARRIVAL = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R20+URZ], RZ"


@pytest.mark.parametrize(
    ("instructions", "found"),
    [
        (["LDS.64 R8, [R4]", ARRIVAL], 1),
        (["LDSM.16.M88.4 R8, [R4]", "IADD3 R30, R31, R32, RZ", ARRIVAL], 1),
        (["LDS.128 R8, [R4]", "LOP3.LUT R30, R11, 0x1, RZ, 0xc0, !PT", ARRIVAL], 0),
        (["LDS.64 R8, [R4]", "@P0 HMMA.16816.F32 R40, R8, R50, R40", ARRIVAL], 0),
        (["LDS.64 R8, [R4]", *["NOP"] * 48, ARRIVAL], 0),
        (["@P0 LDS.64 R8, [R4]", ARRIVAL], 0),
        (["LDS.64 R8, [R4]", "WARPGROUP.DEPBAR.LE gsb0, 0x1", f"@!P0 {ARRIVAL}"], 0),
        (["LDS.64 R8, [R4]", "WARPGROUP.DEPBAR.LE gsb0, 0x1", *["NOP"] * 9, f"@!P0 {ARRIVAL}"], 0),
        (["LDS.64 R8, [R4]", "WARPGROUP.DEPBAR.LE gsb0, 0x1", *["NOP"] * 10, f"@!P0 {ARRIVAL}"], 1),
        (["WARPGROUP.DEPBAR.LE gsb0, 0x1", "LDS.64 R8, [R4]", f"@!P0 {ARRIVAL}"], 1),
        (["LDS.64 R8, [R4]", "WARPGROUP.DEPBAR.LE gsb0, 0x1", ARRIVAL], 1),
        (["LDS.64 R8, [R4]", f"@!P0 {ARRIVAL}"], 1),
        (["LDS.64 R8, [R4]", ARRIVAL.replace("A1T0", "RED.A1T0")], 0),
        (["LDS.64 R8, [R4]", "SYNCS.ARRIVE.TRANS64 RZ, [UR8], R30"], 0),
    ],
)
def test_reads_under_way_are_found(instructions: list[str], found: int) -> None:
    listing = "".join(f"/*{16 * place:04x}*/ {text} ;\n" for place, text in enumerate(instructions))
    assert len(reads_under_way(listing, window=48)) == found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("sm90_w4a16_mlp", 10), ("sm90_w4a16_linear", 8)])
def test_no_arrival_overtakes_reads(name: str, count: int) -> None:
    """Where SM90's kernels give back what the copy engine fills again, all of it is in registers. Arrivals that were at
    fault followed their reads by 2 to 46 instructions; reads that have nothing to do with one lie 55 ahead."""
    sass = compiled("sm_90a").sass(f"{name}.cu")
    kernels = [text for text in sass.split("Function : ") if f"{name}I" in text.splitlines()[0]]
    assert len(kernels) == count
    for kernel in kernels:
        assert len(re.findall(r"SYNCS\.ARRIVE\S*A1T0", kernel)) >= 2
        assert reads_under_way(kernel, window=48) == [], kernel.splitlines()[0]
