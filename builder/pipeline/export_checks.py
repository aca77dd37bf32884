"""What the export of a Hugging Face directory would show to be wrong with a request, said before the export."""

from __future__ import annotations

from collections.abc import Mapping

from trt_nvfp4.builder.export.decoder_contract import CacheOptions
from trt_nvfp4.builder.export.expected_inputs import expected_inputs
from trt_nvfp4.builder.export.huggingface import is_model_directory
from trt_nvfp4.builder.inputs.shapes import Shape, derive_profiles
from trt_nvfp4.builder.pipeline.calibrate_step import check_samples
from trt_nvfp4.builder.pipeline.request import Request
from trt_nvfp4.calibration.samples.samples import CACHE
from trt_nvfp4.calibration.samples.text import SUFFIXES as TEXTS
from trt_nvfp4.calibration.statistics.store import is_statistics


def check_before_export(request: Request) -> None:
    """Raises BuilderError or CalibrationError for shapes and samples that the exported model will not take, as far as
    the directory's configuration tells."""
    least, typical, most = (_but_caches(bound) for bound in (request.least, request.typical, request.most))
    data = request.calib_data
    samples = data is not None and data.suffix not in TEXTS and not is_statistics(data) and request.stop_after != "plan"
    if not is_model_directory(request.model) or request.trust_remote_code or not (least or typical or most or samples):
        return
    cache = CacheOptions(request.cache_capacity, request.max_batch or 1)
    expected = expected_inputs(request.model, request.task, cache)
    if expected is None:
        return
    derive_profiles({name: spec.shape for name, spec in expected.specs.items()}, least, typical, most, expected.longest)
    if samples and expected.complete:
        check_samples(request, expected.specs)


def _but_caches(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """How many caches there are, the export alone tells."""
    return {name: shape for name, shape in shapes.items() if not CACHE.search(name) or name == "past_length"}
