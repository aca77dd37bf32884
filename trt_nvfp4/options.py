"""The arguments of the public functions: a command's options, and what follows the run."""

import attrs

from trt_nvfp4.builder.bench.bench_options import BenchOptions
from trt_nvfp4.builder.pipeline.build_options import BuildOptions
from trt_nvfp4.builder.terminal.progress import Progress


@attrs.frozen
class BuildArguments(BuildOptions):
    """The arguments of `build`, `build_parts`, `plan` and `rewrite`."""

    #: Is called with stages and steps.
    progress: Progress | None = attrs.field(default=None, kw_only=True)


@attrs.frozen
class BenchArguments(BenchOptions):
    """The arguments of `bench`."""

    #: Is called with stages and steps.
    progress: Progress | None = attrs.field(default=None, kw_only=True)
