"""The model that is built: the file that was given, or what becomes of a file or a Hugging Face directory."""

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress

import attrs
import onnx_ir as ir

from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.export import huggingface as export
from trt_nvfp4.builder.export.onnx_decoders import convert_decoder
from trt_nvfp4.builder.export.tokenizer_files import copy_beside
from trt_nvfp4.builder.export.unused_tensors import further_layers
from trt_nvfp4.builder.inputs.decoder_profiles import decoder_profiles
from trt_nvfp4.builder.inputs.possible_shapes import check_possible
from trt_nvfp4.builder.inputs.shape_values import value_profiles
from trt_nvfp4.builder.inputs.shapes import Profiles, Range, derive_profiles
from trt_nvfp4.builder.model.cache_support import check_caches_run
from trt_nvfp4.builder.model.decoder_contract import AUTO, CacheOptions
from trt_nvfp4.builder.model.model import Model
from trt_nvfp4.builder.model.onnx_file import is_exported, read_if_any
from trt_nvfp4.builder.pipeline.request import SURGERY
from trt_nvfp4.builder.pipeline.run import Run
from trt_nvfp4.builder.pipeline.surgery_step import operate
from trt_nvfp4.common.replacing import scratch
from trt_nvfp4.graph_passes.load.faults import naming
from trt_nvfp4.graph_passes.load.source import checked
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS, DEFAULT_KINDS


def read_model(run: Run, made: ExitStack) -> None:
    """Fills in the model, before and after surgery. `made` removes files that only the build needs."""
    request = run.request
    run.model = run.original = _onnx_file(run, made)
    if request.surgery is not None:
        run.progress.stage(f"changing the graph with {request.surgery.name}")
        path = request.file(SURGERY)
        operate(run.original, request.surgery, path)
        run.report.files["model after surgery"] = str(path)
        run.model = Model(path, request.model, weights=run.original.weights)
    if run.model.weights:
        made.enter_context(naming(request.model, run.model.path))
    take_model(run)


def take_model(run: Run) -> None:
    """Choose the default kinds for the model, and copy its tokenizer to where the engine finds it."""
    decoder = run.model.decoder
    if run.request.kinds is None:  # a decoder reads all its weights for every token
        run.request = attrs.evolve(run.request, kinds=DEFAULT_KINDS if decoder is None else ALL_KINDS)
    if decoder is not None and decoder.tokenizer is not None:
        copied = copy_beside(run.model.tokenizer, run.request.base)
        if copied is not None:
            run.report.files["tokenizer"] = str(copied)


def set_possible_profiles(run: Run, values: Mapping[str, int]) -> None:
    """As `set_profiles`, with a batch of 1 where the graph takes no other and none was given.

    Raises UsageError for shapes that the graph does not take.
    """
    set_profiles(run, values)
    try:
        check_possible(run.model.path, run.network, run.profiles)
    except BuilderError as error:
        if run.model.decoder is None:
            set_profiles(run, values, batch=(1, 1, 1))
            with suppress(BuilderError):
                check_possible(run.model.path, run.network, run.profiles)
                run.report.warnings.append(f"the engine takes a batch of 1 only: {error}")
                return
        raise


def set_profiles(run: Run, values: Mapping[str, int], batch: Range | None = None) -> None:
    """Fills in the engine's optimization profiles: one, or a decoder's two, prefill and decode. `values` are the inputs
    whose values are a shape; `batch` is the range of batches that nothing else is said of."""
    request, report, decoder = run.request, run.report, run.model.decoder
    shapes = {name: spec.shape for name, spec in run.model.specs.items() if name not in values}
    given = (request.min_shapes, request.opt_shapes, request.max_shapes)
    # An unknown input name is reported with the list of valid names.
    min_shapes, opt_shapes, max_shapes = (
        {name: bound[name] for name in bound if name not in values} for bound in given
    )
    profiles: list[Profiles]
    if decoder is not None:
        profiles = decoder_profiles(shapes, decoder, min_shapes, opt_shapes, max_shapes)
    else:
        longest = export.longest_sequence(request.model, request.trust_remote_code)
        profiles = [derive_profiles(shapes, min_shapes, opt_shapes, max_shapes, longest, batch=batch)]
    report.profiles, *further = [
        {name: [list(p.min), list(p.opt), list(p.max)] for name, p in profile.items()} for profile in profiles
    ]
    report.decode_profiles = further[0] if further else {}
    ranges = value_profiles(values, given)
    report.shape_values = {name: [list(p.min), list(p.opt), list(p.max)] for name, p in ranges.items()}
    run.profiles = [{**profile, **ranges} for profile in profiles]


def _onnx_file(run: Run, made: ExitStack) -> Model:
    """The model before surgery. One without some of its weights lies in a folder that `made` removes."""
    request, report = run.request, run.report
    if request.cache == "inplace":
        run.progress.stage(f"converting the caches of {request.model.name}")
        converted = request.file(".inplace.onnx")
        convert_decoder(request.model, converted, request.cache_capacity, request.max_batch or 1)
        report.files["model with caches in place"] = str(converted)
        return Model(converted, request.model)
    if not request.model.is_dir():
        model = Model(request.model, request.model, checked(request.model) if run.given is None else run.given)
        if model.decoder is not None:
            check_caches_run(request.model)
        return model
    model = _exported(run, made)
    decoder = model.decoder
    report.exported = {
        "task": "features" if decoder is None else export.TEXT if request.task == export.TEXT else "generate",
        "cache_capacity": None if decoder is None else decoder.capacity,
        "max_batch": decoder.max_batch if decoder else 1,
        "all_logits": request.all_logits,
        "draft": None if request.draft == "none" else request.draft,
        "adapter": None if request.adapter is None else str(request.adapter.absolute()),
        "image_size": request.image_size,
        "batch": request.batch,
    }
    if decoder is not None and request.draft != AUTO and (note := further_layers(request.model)) is not None:
        report.warnings.append(note)
    return model


def _exported(run: Run, made: ExitStack) -> Model:
    request = run.request
    run.progress.stage(f"exporting {request.model.name} to ONNX")
    cache = CacheOptions(request.cache_capacity, request.max_batch or 1, request.all_logits, request.head)
    exported, own = request.file(".onnx"), (request.trust_remote_code, request.adapter)
    fixed = request.fixed_sizes
    weights: Mapping[str, ir.TensorProtocol] = {}
    if request.runs_model:
        export.export(request.model, exported, request.task, cache, *own, fixed=fixed)
    else:
        graph = made.enter_context(scratch(exported.parent)) / exported.name
        weights = export.export_by_reference(request.model, graph, request.task, cache, *own, fixed)
        if weights:
            if is_exported(read_if_any(exported)):  # an earlier one would pass for this engine's
                exported.unlink()
                exported.with_name(f"{exported.name}.data").unlink(missing_ok=True)
            exported = graph
        else:
            exported.unlink(missing_ok=True)  # which beside other weights would pass for whole
            exported.with_name(f"{exported.name}.data").unlink(missing_ok=True)
            for file in sorted(graph.parent.iterdir(), reverse=True):
                os.replace(file, exported.with_name(file.name))
    if not weights:
        run.report.files["exported model"] = str(exported)
    return Model(exported, request.model, weights=weights)
