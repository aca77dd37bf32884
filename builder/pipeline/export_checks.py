"""Checks of a request before the export of a Hugging Face directory, which would find the same faults later."""

from collections.abc import Mapping

from trt_nvfp4.builder.export.expected_inputs import expected_inputs
from trt_nvfp4.builder.inputs.shape_text import Shape
from trt_nvfp4.builder.inputs.shapes import derive_profiles
from trt_nvfp4.builder.model.decoder_contract import CacheOptions
from trt_nvfp4.builder.model.model_files import is_model_directory
from trt_nvfp4.builder.pipeline.calibrate_step import check_samples
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.calibration.samples.samples import CACHE
from trt_nvfp4.calibration.samples.text import SUFFIXES as TEXTS
from trt_nvfp4.calibration.statistics.store import is_statistics


def check_before_export(request: Request) -> None:
    """Raises BuilderError or CalibrationError for a capacity of caches, shapes and samples that the exported model will
    not take, as far as the directory's configuration tells."""
    given = (request.min_shapes, request.opt_shapes, request.max_shapes)
    min_shapes, opt_shapes, max_shapes = map(_but_caches, given)
    data = request.calib_data
    samples = data is not None and data.suffix not in TEXTS and not is_statistics(data) and request.stop_after != "plan"
    stated = any(given) or samples
    if not (stated or request.cache_capacity) or not is_model_directory(request.model) or request.trust_remote_code:
        return
    cache = CacheOptions(request.cache_capacity, request.max_batch or 1)
    expected = expected_inputs(request.model, request.task, cache, request.fixed_sizes)
    if expected is None or not stated:
        return
    derive_profiles(
        {name: spec.shape for name, spec in expected.specs.items()},
        min_shapes,
        opt_shapes,
        max_shapes,
        expected.longest,
    )
    if samples and expected.complete:
        check_samples(request, expected.specs)


def _but_caches(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes without those of caches, whose number only the export shows."""
    return {name: shape for name, shape in shapes.items() if not CACHE.search(name) or name == "past_length"}
