"""Run as a program: builds a small engine, loads it many times in one process, and prints what happened as JSON.

On a CPU an engine is refused where its weights go to the GPU, which is after its plugin library has been registered.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import tensorrt_rtx as trt
import torch
from build_in_tensorrt_rtx import Log, model, random_case

from trt_nvfp4.builder.tensorrt.backend import Backend

EXISTS = "exists already"


def build(library: Path, embed: bool) -> bytes:
    case, log = random_case("NVFP4Linear", torch.float16), Log()
    Backend("tensorrt_rtx").load_plugins(library)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    assert parser.parse(model("NVFP4Linear", case, {"activation": 0, "quantize_activations": 0})), log.errors
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    if embed:
        config.plugins_to_serialize = [str(library)]
    profile = builder.create_optimization_profile()
    shape = tuple(case.inputs[0].shape)
    profile.set_shape("x", *((*shape[:-2], rows, shape[-1]) for rows in (1, 8, 300)))
    config.add_optimization_profile(profile)
    return bytes(memoryview(builder.build_serialized_network(network, config)))


class Runtime:
    """A TensorRT runtime and what it says."""

    def __init__(self, library: Path | None) -> None:
        self.log = Log()
        self.runtime = trt.Runtime(self.log)
        self.runtime.engine_host_code_allowed = library is None
        if library is not None:
            Backend("tensorrt_rtx").load_plugins(library, self.registry)

    @property
    def registry(self) -> Any:
        return self.runtime.get_plugin_registry()

    def load(self, engine: bytes) -> None:
        self.runtime.deserialize_cuda_engine(engine)

    def found(self) -> dict[str, Any]:
        creators = [creator.name for creator in self.registry.all_creators]
        return {"creators": creators, "collisions": sum(EXISTS in error for error in self.log.errors)}


def run(library: Path, scratch: Path, count: int) -> dict[str, Any]:
    embedded, bare = build(library, embed=True), build(library, embed=False)
    one_embedded, one_bare = Runtime(None), Runtime(library)
    each_embedded = [Runtime(None) for _ in range(count)]
    # Copies of the file stand for versions of the library: TensorRT tells them apart by nothing else.
    copies = [Path(shutil.copy(library, scratch / f"version{number}.so")) for number in range(count)]
    each_version = [Runtime(copy) for copy in copies]
    for number in range(count):
        one_embedded.load(embedded)
        one_bare.load(bare)
        each_embedded[number].load(embedded)
        each_version[number].load(bare)
    return {
        "sizes": [len(embedded), len(bare)],
        "one_embedded": one_embedded.found(),
        "one_bare": one_bare.found(),
        "each_embedded": [runtime.found() for runtime in each_embedded],
        "each_version": [runtime.found() for runtime in each_version],
    }


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("library", type=Path)
    arguments.add_argument("scratch", type=Path)
    arguments.add_argument("count", type=int)
    given = arguments.parse_args()
    print(json.dumps(run(given.library, given.scratch, given.count)))
