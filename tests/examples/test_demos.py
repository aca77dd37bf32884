"""The demos show the public API: they import nothing below it."""

import ast
from pathlib import Path

import pytest

import trt_nvfp4

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["minilm_demo.py", "llm_demo.py", "build_minilm.py"])
def test_a_demo_calls_the_public_api(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module for module in imported if module.startswith("trt_nvfp4")} == {"trt_nvfp4"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trt_nvfp4"
    }
    assert {"build"} <= used <= set(trt_nvfp4.__all__)
