"""TensorRT engines with NVFP4 plugins.

    import trt_nvfp4

    result = trt_nvfp4.build("model.onnx", target="ada", output="model.engine")
    print(result.engine, result.warnings)

The functions raise TrtNvfp4Error (or OSError), print nothing and never exit. docs/reference/api.md shows them at work.
"""

import importlib
from typing import TYPE_CHECKING

from trt_nvfp4.errors import TrtNvfp4Error

if TYPE_CHECKING:
    from trt_nvfp4.api import (
        BenchResult,
        BuildOptions,
        BuildResult,
        Component,
        Generator,
        Inspection,
        Loop,
        Pipeline,
        ProgressBar,
        SubgraphResult,
        bench,
        build,
        build_parts,
        compare,
        compare_steps,
        inline_plugins,
        inspect,
        plan,
        rewrite,
        run,
        why,
    )

__all__ = [
    "BenchResult",
    "BuildOptions",
    "BuildResult",
    "Component",
    "Generator",
    "Inspection",
    "Loop",
    "Pipeline",
    "ProgressBar",
    "SubgraphResult",
    "TrtNvfp4Error",
    "bench",
    "build",
    "build_parts",
    "compare",
    "compare_steps",
    "inline_plugins",
    "inspect",
    "plan",
    "rewrite",
    "run",
    "why",
]


def __getattr__(name: str) -> object:
    """Imports Torch and ONNX only when a function is used."""
    if name in __all__:
        return getattr(importlib.import_module("trt_nvfp4.api"), name)
    raise AttributeError(f"module 'trt_nvfp4' has no attribute '{name}'")
