"""The header that the adapters are compiled with says what the ops' Python definitions say."""

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trt_nvfp4.plugins.compile import op_header
from trt_nvfp4.plugins.compile.library import ROOT
from trt_nvfp4.plugins.compile.toolchain import ToolchainError, find_host_compiler
from trt_nvfp4.plugins.ops import OPS, Formal, OpDefinition

PROGRAM = """
#include <cstdio>
#include "op_definitions.h"
using namespace trt_nvfp4;
template <typename Op> void show() {
    Definition const d = Op::definition();
    std::printf("op %s\\n", d.name);
    for (Port const& p : d.inputs) std::printf("in %s %d\\n", p.name.c_str(), static_cast<int>(p.role));
    for (Port const& p : d.outputs) std::printf("out %s %d\\n", p.name.c_str(), static_cast<int>(p.role));
    for (Attribute const& a : d.attributes) {
        if (a.is_float) std::printf("float %s %.9g\\n", a.name, a.real);
        else std::printf("int %s %d %d %d\\n", a.name, a.integer, a.smallest, a.largest);
    }
}
template <typename... Ops> void show_all(OpList<Ops...>) { (show<Ops>(), ...); }
"""


def _compiled(ops: Sequence[OpDefinition], folder: Path, then: str = "") -> list[str]:
    """What the C++ side knows of `ops`, a line for each port and attribute, and what the statement `then` prints."""
    try:
        compiler = find_host_compiler(platform.machine())
    except ToolchainError as error:
        pytest.skip(str(error))
    (folder / op_header.NAME).write_text(op_header.op_header(ops))
    (folder / "show.cpp").write_text(PROGRAM + f"int main() {{ show_all(AllOps{{}}); {then} }}")
    command = [compiler, "-std=c++17", "-Wall", "-Werror", f"-I{ROOT / 'adapters'}", "show.cpp", "-o", "show"]
    subprocess.run(command, cwd=folder, check=True)
    return subprocess.run([folder / "show"], check=True, capture_output=True, text=True).stdout.splitlines()


def _expected(op: OpDefinition) -> list[str]:
    role = {"T": 0, "tensor(int8)": 1, "tensor(float)": 2, "C": 3, "L": 4}
    lines = [f"op {op.name}"]
    lines += [f"in {port.name} {role[port.type]}" for port in op.inputs]
    lines += [f"out {port.name} {role[port.type]}" for port in op.outputs]
    for name, value in op.attributes.items():
        if isinstance(value, float):
            lines.append(f"float {name} {value:.9g}")
        else:
            allowed = [n for n in (*range(-1, 1100), *range(65_530, 65_540), 2**31 - 1) if _takes(op, name, n)]
            lines.append(f"int {name} {value} {allowed[0]} {allowed[-1]}")
    return lines


def _takes(op: OpDefinition, name: str, value: int) -> bool:
    try:
        op.complete_attributes(**{name: value})
    except ValueError:
        return False
    return True


def test_all_ops_reach_the_adapters(tmp_path: Path) -> None:
    lines = _compiled(list(OPS.values()), tmp_path)
    floats = [line for op in OPS.values() for line in _expected(op)]
    assert [_rounded(line) for line in lines] == [_rounded(line) for line in floats]


def _rounded(line: str) -> str:
    """C++ holds a float32, Python a float64."""
    kind, name, *values = line.split()
    return f"{kind} {name} {float(values[0]):.6g}" if kind == "float" else line


def test_a_change_in_python_reaches_the_adapters(tmp_path: Path) -> None:
    """A port, an attribute, a default and a range that the op does not have today; and attributes are read by name."""
    op = OPS["NVFP4Linear"]
    changed = replace(
        op,
        inputs=(op.inputs[0], Formal("shift", "tensor(float)", "[N]"), *op.inputs[1:]),
        attributes={"rounds": 7, **op.attributes, "margin": 0.25},
        ranges={**op.ranges, "rounds": (3, 9)},
    )
    then = (
        "auto values = NVFP4Linear::definition().attributes; values[0].integer = 5; NVFP4Linear const op(values);"
        'std::printf("read %d %g, ports %d %d", op.rounds, op.margin, NVFP4Linear::kShift, NVFP4Linear::kWeight);'
    )
    lines = _compiled([changed], tmp_path, then)
    assert {"in shift 2", "int rounds 7 3 9", "float margin 0.25"} <= set(lines)
    assert lines[-1] == "read 5 0.25, ports 1 2"
    assert op_header.op_header([changed]) != op_header.op_header([op])


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_parts_of_a_weight_follow_one_another(op: OpDefinition) -> None:
    """The adapters read a weight from its first port on."""
    ports = [port.name for port in op.inputs]
    weights = [port.name for port in op.inputs if port.type == "tensor(int8)" and port.name.endswith("weight")]
    for weight in weights:
        parts = ports[ports.index(weight) :]
        kind = ["_scales", "_tensor_scale", "bias"] if parts[1].endswith("_scales") else ["_scale", "bias"]
        assert all(part.endswith(end) for part, end in zip(parts[1:], kind, strict=False)), (weight, parts)
