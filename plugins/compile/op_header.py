"""The C++ header that tells the adapters what the op definitions say: ports, attributes, defaults, ranges.

It is written when the library is compiled, into the folder of the build:

    python -m trt_nvfp4.plugins.compile.op_header FILE
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trt_nvfp4.plugins.ops import OpDefinition, StandardOp

#: Adapters include it by this name.
NAME = "op_definitions.h"
#: The header of `linked_header`, which exports.cpp includes.
LINKED = "linked_kernels.h"
#: Sources that compile where the ops are not, as those in a bundle, have the header here.
_SHIPPED = Path("compile") / NAME
_ROLES = {
    "T": "kT",
    "S": "kState",
    "C": "kCache",
    "L": "kLength",
    "tensor(int8)": "kBytes",
    "tensor(float)": "kFloat",
}


def op_header(ops: Iterable[OpDefinition | StandardOp] | None = None) -> str:
    """The header's text: a struct for each op, and the list of them. `ops`: None: this project's."""
    if ops is None:
        shipped = Path(__file__).resolve().parents[1] / _SHIPPED
        if shipped.is_file():
            return shipped.read_text()
        from trt_nvfp4.plugins.ops import OPS, STANDARD_OPS  # needs Torch and ONNX, which a device may lack

        ops = [*OPS.values(), *STANDARD_OPS.values()]
    ops = list(ops)
    names = ", ".join(op.name for op in ops)
    return "\n".join(
        [
            "// Written from plugins/ops by plugins/compile/op_header.py.",
            "#pragma once",
            '#include "definition.h"',
            "namespace trt_nvfp4 {",
            *map(_struct, ops),
            f"using AllOps = OpList<{names}>;",
            "}  // namespace trt_nvfp4",
            "",
        ]
    )


def linked_header(ops: Iterable[str], groups: Iterable[str]) -> str:
    """The header that tells a library which ops it can create, and which groups of kernels it has."""
    return "\n".join(
        [
            "#pragma once",
            f'#include "{NAME}"',
            "namespace trt_nvfp4 {",
            f"using LinkedOps = OpList<{', '.join(sorted(ops))}>;",
            f'constexpr char kLinkedKernels[] = "{" ".join(sorted(groups))}";',
            "}  // namespace trt_nvfp4",
            "",
        ]
    )


def ship(plugins: Path) -> None:
    """Put the header into a copy of the folder `plugins` that has no ops."""
    (plugins / _SHIPPED).write_text(op_header())


def _struct(op: OpDefinition | StandardOp) -> str:
    types = {name: "float" if isinstance(default, float) else "int32_t" for name, default in op.attributes.items()}
    members = {name: "real" if kind == "float" else "integer" for name, kind in types.items()}
    read = ", ".join(f"{name}(values.at({i}).{members[name]})" for i, name in enumerate(op.attributes))
    return f"""struct {op.name} {{
    enum Input : int32_t {{ {", ".join(_constant(port.name) for port in op.inputs)} }};
    enum Output : int32_t {{ {", ".join(_constant(port.name) for port in op.outputs)} }};
    {" ".join(f"{kind} {name};" for name, kind in types.items())}
    explicit {op.name}(std::vector<Attribute> const& values) : {read} {{}}
    static Definition definition() {{
        return {{"{op.name}",
                {{{", ".join(f'{{"{port.name}", Role::{_ROLES[port.type]}}}' for port in op.inputs)}}},
                {op.required},
                {{{", ".join(f'{{"{port.name}", Role::{_ROLES[port.type]}}}' for port in op.outputs)}}},
                {{{", ".join(_attribute(op, name) for name in op.attributes)}}}}};
    }}
}};"""


def _constant(port: str) -> str:
    """Enumerator of a port: `gate_up_weight` is `kGateUpWeight`."""
    return "k" + "".join(word.capitalize() for word in port.split("_"))


def _attribute(op: OpDefinition | StandardOp, name: str) -> str:
    default = op.attributes[name]
    if isinstance(default, float):
        return f'float_attribute("{name}", {default!r}f)'
    if isinstance(default, str):
        choices = ", ".join(f'"{choice}"' for choice in op.choices[name])
        return f'string_attribute("{name}", {op.choices[name].index(default)}, {{{choices}}})'
    smallest, largest = op.range_of(name)
    return f'int_attribute("{name}", {default}, {smallest}, {largest})'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(op_header())
