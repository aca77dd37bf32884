"""Counts the instructions that decode and multiply a word of eight codes, from the machine code of the W4A16 kernels.

Compiles the kernels that stream weights for each architecture, finds the loop over a chunk of weights in the
disassembly, and counts its instructions by the pipe that executes them. No GPU is needed:

    python -m benchmarks.kernels.issue_slots --out benchmarks/results/kernels/issue_slots.json
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import shutil
import site
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.plugins.compile.toolchain import find_nvcc

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
SOURCE = PLUGINS / "kernels" / "api" / "dense" / "w4a16.cu"
ARCHS = ("sm_89", "sm_90a", "sm_100a", "sm_120a")
# Two pipes take 16 lanes a clock each (measured on an H200, benchmarks/NOTES.md, "What an SM can do").
ALU = {"LOP3", "SHF", "PRMT", "F2FP", "SEL", "ISETP", "LEA", "VIADD", "IADD3"}
FMA = {"IMAD", "HMUL2", "HFMA2", "HADD2", "FFMA", "FMUL", "FADD"}
# A chunk of a warp: 32 words of each lane, which one mma for eight tokens multiplies each.
WORDS = 32
KERNEL = re.compile(r"sm80_w4a16_(mlp|token)I(6__half|13__nv_bfloat16)(?:Li(\d)E)?Li2EE")

Instruction = tuple[str, str]


def find_nvdisasm() -> str:
    """The disassembler, of a CUDA toolkit on PATH or of the package nvidia-cuda-nvdisasm."""
    packaged = [str(path) for root in site.getsitepackages() for path in Path(root).glob("nvidia/cu*/bin")]
    if found := shutil.which("nvdisasm") or shutil.which("nvdisasm", path=":".join(packaged)):
        return found
    raise SystemExit("no nvdisasm: put a CUDA toolkit on PATH or install nvidia-cuda-nvdisasm")


def functions(cubin: Path, disassembler: str) -> Iterator[tuple[str, list[Instruction]]]:
    """(mangled name, instructions and labels) of every kernel."""
    text = subprocess.run([disassembler, "-c", cubin], check=True, capture_output=True, text=True).stdout
    for section in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.MULTILINE)[1:]:
        found = re.findall(r"^(?:(\.L\w+):|\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)(.*))", section, re.M)
        yield section.split(",", 1)[0], [(label or operation, rest) for label, operation, rest in found]


def chunk_loop(instructions: list[Instruction]) -> list[str]:
    """The opcodes of the shortest loop that multiplies a whole chunk."""
    labels = {name: i for i, (name, _) in enumerate(instructions) if name.startswith(".L")}
    loops = []
    for i, (name, operands) in enumerate(instructions):
        target = re.search(r"`\((\.L\w+)\)", operands)
        if name.startswith("BRA") and target and labels.get(target[1], i) < i:
            body = [op.split(".")[0] for op, _ in instructions[labels[target[1]] : i + 1] if not op.startswith(".")]
            if body.count("HMMA") >= WORDS or body.count("HFMA2") >= 4 * WORDS:
                loops.append(body)
    return min(loops, key=len)


def count(arch: str, folder: Path) -> Iterator[dict[str, float | str | int]]:
    """One entry per kernel of an architecture: instructions per word."""
    toolchain = find_nvcc()
    cubin = folder / f"{arch}.cubin"
    includes = [f"-I{PLUGINS / name}" for name in ("kernels", "interface")]
    options = ["-std=c++17", "-O3", "-w", "-cubin", f"-arch={arch}"]
    command = [toolchain.nvcc, *toolchain.compile_flags(), *options, *includes, "-o", cubin, SOURCE]
    subprocess.run(command, check=True)
    for name, instructions in functions(cubin, find_nvdisasm()):
        if (kernel := KERNEL.search(name)) is None:
            continue
        found = collections.Counter(chunk_loop(instructions))
        yield {
            "arch": arch,
            "dtype": "float16" if kernel[2] == "6__half" else "bfloat16",
            "tokens": 1 if kernel[1] == "token" else 8 * int(kernel[3]),
            "alu": sum(found[op] for op in ALU) / WORDS,
            "fma": sum(found[op] for op in FMA) / WORDS,
            "mma": found["HMMA"] / WORDS,
            "all": sum(found.values()) / WORDS,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the record to write (JSON)")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        loops = [entry for arch in ARCHS for entry in count(arch, Path(folder))]
    version = subprocess.run([find_nvcc().nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    release = re.search(r"V([\d.]+)", version)
    loops.sort(key=lambda entry: [str(entry["arch"]), str(entry["dtype"]), int(entry["tokens"])])
    record = {"nvcc": release[1] if release else "", "command": f"python -m benchmarks.kernels.issue_slots --out {out}"}
    with replacing(out) as path:
        path.write_text(json.dumps({"environment": record, "loops": loops}, indent=1) + "\n")


if __name__ == "__main__":
    main()
