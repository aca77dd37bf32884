"""docs/reference/ops.md says what the op definitions say."""

from pathlib import Path

import pytest

from trt_nvfp4.plugins.ops import OPS
from trt_nvfp4.plugins.ops.activation import Activation

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "ops.md").read_text()


@pytest.mark.parametrize("name", OPS)
def test_section_lists_every_input_output_and_attribute(name: str) -> None:
    section = PAGE.split(f"### `{name}`")[1].split("\n### ")[0]
    op = OPS[name]
    for direction, formals in (("in", op.inputs), ("out", op.outputs)):
        for formal in formals:
            assert f"| {direction} | `{formal.name}` | {formal.type} | {formal.doc} |" in section
    for attribute, default in op.attributes.items():
        kind = "INT" if isinstance(default, int) else "FLOAT"
        assert f"| attribute | `{attribute}` | {kind} | default {default} |" in section
    assert section.count("\n| ") == len(op.inputs) + len(op.outputs) + len(op.attributes) + 1


@pytest.mark.parametrize("activation", Activation)
def test_activations_are_listed(activation: Activation) -> None:
    assert f"{int(activation)} {activation.name.lower()}" in PAGE
