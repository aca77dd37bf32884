"""The C++ header that tells the adapters what the op definitions say: ports, attributes, defaults, ranges.

It is written when the library is compiled, into the folder of the build:

    python -m trt_nvfp4.plugins.compile.op_header FILE
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from trt_nvfp4.plugins.ops import OPS, OpDefinition

#: Adapters include it by this name.
NAME = "op_definitions.h"
_ROLES = {
    "T": "kT",
    "C": "kCache",
    "L": "kLength",
    "tensor(int8)": "kBytes",
    "tensor(float)": "kFloat",
}


def op_header(ops: Iterable[OpDefinition] = OPS.values()) -> str:
    """The header's text: a struct for each op, and the list of them."""
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


def _struct(op: OpDefinition) -> str:
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
                {{{", ".join(f'{{"{port.name}", Role::{_ROLES[port.type]}}}' for port in op.outputs)}}},
                {{{", ".join(_attribute(op, name) for name in op.attributes)}}}}};
    }}
}};"""


def _constant(port: str) -> str:
    """Enumerator of a port: `gate_up_weight` is `kGateUpWeight`."""
    return "k" + "".join(word.capitalize() for word in port.split("_"))


def _attribute(op: OpDefinition, name: str) -> str:
    default = op.attributes[name]
    if isinstance(default, float):
        return f'float_attribute("{name}", {default!r}f)'
    smallest, largest = op.range_of(name)
    return f'int_attribute("{name}", {default}, {smallest}, {largest})'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(op_header())
