"""Builds every part of a model, each with a plan and a verification of its own, and compares the chain with the
original."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trt_nvfp4.builder.components.calibration import record, record_prompts, specs_of
from trt_nvfp4.builder.components.check import check_export, computed_by, cosine, expected_of
from trt_nvfp4.builder.components.devices.onnx_device import decoder_of_parts, model_of
from trt_nvfp4.builder.components.diffusion.runs import PictureOptions
from trt_nvfp4.builder.components.manifest import DIFFUSE, FILE, Manifest, Part
from trt_nvfp4.builder.components.parts import described, packed_of
from trt_nvfp4.builder.components.policies.bundled import write_script
from trt_nvfp4.builder.components.policies.processing import POLICY, Processing
from trt_nvfp4.builder.components.policies.source import of_policy
from trt_nvfp4.builder.components.source import Example, Source
from trt_nvfp4.builder.components.user_modules import is_python_file, of_file
from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer
from trt_nvfp4.builder.inputs.shapes import RANGES
from trt_nvfp4.builder.model.decoder_contract import IDS, TOKENIZER, CacheOptions
from trt_nvfp4.builder.model.model_files import is_pipeline, is_policy
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.pipeline.request import Request, part_of
from trt_nvfp4.builder.pipeline.request_checks import check_no_pipeline, check_parts
from trt_nvfp4.builder.report.parts_report import PartsReport
from trt_nvfp4.builder.report.report import Report
from trt_nvfp4.builder.report.whole_folder import rename_in_reports, whole_folder
from trt_nvfp4.builder.terminal.progress import Named, Progress, Silent
from trt_nvfp4.calibration.samples.samples import load_samples
from trt_nvfp4.calibration.samples.text import read_prompts
from trt_nvfp4.common.metrics import psnr, relative_error
from trt_nvfp4.common.replacing import made_folder, scratch
from trt_nvfp4.graph_passes.planning.kinds.registry import ALL_KINDS

#: Beside the manifest: what became of each part, and how the chain compares.
REPORT = "components.report.json"
#: Builds all parts of a bundle on the device.
SCRIPT = "build_engine.py"
_SCRIPT = '''#!/usr/bin/env python3
"""Builds the engine of every part in this folder, and checks it; options are those of each part's script."""

import json
import subprocess
import sys
from pathlib import Path

folder = Path(__file__).resolve().parent
for part in json.loads((folder / "{manifest}").read_text())["parts"]:
    print(part["name"], flush=True)
    status = subprocess.run([sys.executable, str(folder / part["name"] / "{script}"), *sys.argv[1:]]).returncode
    if status:
        sys.exit(status)
'''


def run(request: Request, progress: Progress | None = None) -> PartsReport:
    """Export, calibrate, build and compare all parts of `request.model`, into the folder of `-o` or `--bundle`.

    Raises what `pipeline.run` raises; of a bundle nothing is left when that happens.
    """
    progress = progress or Silent()
    _check(request)
    destination = request.bundle or request.output
    assert destination is not None
    with made_folder(destination.parent), _folder(request, destination) as folder:
        progress.stage("taking the model apart")
        source = _source(request)
        report = PartsReport(str(request.model), request.target.name, str(destination))
        # The parts' folders of a bundle hold copies of what is exported.
        with scratch(destination.parent) as temporary:
            exported = temporary if request.bundle is not None else folder
            manifest = _exported(source, exported, progress)
            manifest.save(exported)
            expected: list[np.ndarray] = []
            if request.accuracy_samples:
                expected = expected_of(source.example)
                computed = computed_by(exported, manifest, source.example, expected)
                report.chain["export_error"] = check_export(
                    source.name, expected, computed, _in_16_bits(source), source.example.rounding
                )
            else:
                report.warnings.append("--set accuracy-samples=0: the chain is not compared with the original")
            example = replace(source.example, logits=None)
            del source  # the modules' weights: builds need the memory
            samples = _samples(request, exported, manifest, example, temporary / "samples", progress)
            for part in manifest.parts:
                one = _of_part(request, manifest, part, exported, folder / part.name, samples)
                report.parts[part.name] = pipeline.run(one, Named(progress, part.name))
                packed_of(exported, part.name).unlink(missing_ok=True)  # they are in what was built
                if request.bundle is not None:  # which holds it
                    _remove_model(folder / f"{part.name}.rewritten.onnx")
                    report.parts[part.name].files.pop("rewritten model", None)
        _name_shared_library(list(report.parts.values()))
        if request.model.is_dir() and manifest.task != DIFFUSE:
            copy_tokenizer(request.model, folder / TOKENIZER)
        # As rewritten: what flows may have become another type.
        parts = [described(part.name, model_of(folder, part.name), part.loop) for part in manifest.parts]
        manifest = replace(manifest, parts=parts).check(str(destination))
        manifest.save(folder)
        if request.bundle is not None:
            (folder / SCRIPT).write_text(_SCRIPT.format(manifest=FILE, script=SCRIPT))
            if POLICY in manifest.settings:
                write_script(folder)
        if request.accuracy_samples:
            progress.stage("comparing the chain with the original")
            found = computed_by(folder, manifest, example, expected)
            report.chain |= {"cosine": cosine(expected, found), "error": relative_error(found=found, expected=expected)}
            if POLICY in manifest.settings:
                report.joints = Processing.of(manifest.settings[POLICY]).joint_errors(expected[0], found[0])
            if manifest.task == DIFFUSE:
                report.chain |= {"psnr": psnr(found=found[-1], expected=expected[-1])}
        report.take_warnings()
        rename_in_reports(report, folder, destination)
        (folder / REPORT).write_text(report.json() + "\n")
    return report


def _name_shared_library(parts: list[Report]) -> None:
    """The last library has the kernels of all parts and replaced the others."""
    sharing = [part for part in parts if part.plugin_library is not None]
    for part in sharing:
        part.plugin_library = sharing[-1].plugin_library
        part.files["plugin library"] = sharing[-1].files["plugin library"]


def _remove_model(path: Path) -> None:
    for file in (path, path.with_name(path.name + ".data")):
        file.unlink(missing_ok=True)


def _check(request: Request) -> None:
    if not is_pipeline(request.model):
        check_no_pipeline(request)
    elif request.calib_data is not None:
        read_prompts(request.calib_data)
    if request.all_logits:
        raise UsageError(f"--set all-logits=yes: {request.model} generates from its last token; leave it out")
    if request.adapter is not None and (is_python_file(request.model) or is_policy(request.model)):
        raise UsageError(
            f"--adapter {request.adapter.directory}: {request.model} makes its modules itself; merge the adapter "
            "there, with peft's merge_and_unload"
        )
    if request.image_size is not None and is_policy(request.model):
        raise UsageError(f"--set image-size={request.image_size}: {request.model} states its cameras; leave it out")
    if request.output is not None and request.bundle is None and request.output.suffix in (".engine", ".plan"):
        raise UsageError(
            f"-o {request.output}: {request.model} becomes several engines; name a folder, such as "
            f"-o {request.output.with_suffix('')}"
        )
    check_parts(request, f"{request.model} is built part by part; export the parts, and build one with it")


@contextmanager
def _folder(request: Request, destination: Path) -> Iterator[Path]:
    """Where the parts go: a bundle's folder appears when it is whole."""
    if request.bundle is None:
        if destination.exists() and not (destination.is_dir() and _is_free(destination)):
            raise UsageError(f"{destination}: holds other files; name a new folder with -o")
        with made_folder(destination):
            yield destination
        return
    if destination.exists():
        raise UsageError(f"--bundle {destination}: exists already; choose a new folder or remove this one")
    with whole_folder(destination) as folder:
        yield folder


def _is_free(folder: Path) -> bool:
    """Whether a folder is empty, or of an earlier build."""
    return (folder / FILE).is_file() or not any(folder.iterdir())


def _source(request: Request) -> Source:
    if is_python_file(request.model):
        return of_file(request.model, computed=request.accuracy_samples > 0)
    if is_policy(request.model):
        return of_policy(request.model)
    if is_pipeline(request.model):
        from trt_nvfp4.builder.components.diffusion.source import of_pipeline

        pictures = PictureOptions.parse(request.image_size, request.max_batch or 1, request.pipeline_arguments)
        return of_pipeline(request.model, pictures, request.adapter)
    from trt_nvfp4.builder.components.directory import of_directory  # imports transformers

    options = CacheOptions(request.cache_capacity, request.max_batch or 1)
    return of_directory(request.model, options, request.image_size, request.trust_remote_code, request.adapter)


def _exported(source: Source, folder: Path, progress: Progress) -> Manifest:
    parts = []
    for part in source.parts:
        progress.stage(f"exporting {part.name} to ONNX")
        parts.append(part.export(source.name, folder))
    return Manifest(source.task, parts, source.flows, source.settings, source.name).check(source.name)


def _in_16_bits(source: Source) -> bool:
    return any(
        tensor.is_floating_point() and tensor.dtype.itemsize == 2
        for part in source.parts
        for tensor in part.inputs.values()
    )


def _samples(
    request: Request, exported: Path, manifest: Manifest, example: Example, destination: Path, progress: Progress
) -> Path | None:
    """A folder with a folder of samples for each part, made of the user's samples of the whole."""
    if request.calib_data is None:
        return None
    progress.stage("calibrating: running the chain on the samples")
    if example.run is not None:
        record_prompts(exported, manifest, example.run, read_prompts(request.calib_data), destination)
        return destination
    tokenizer = request.model if request.model.is_dir() else None
    found = load_samples(
        request.calib_data, specs_of(manifest), tokenizer, request.trust_remote_code, request.calib_samples
    )
    record(exported, manifest, found, destination)
    return destination


def _of_part(
    request: Request, manifest: Manifest, part: Part, exported: Path, base: Path, samples: Path | None
) -> Request:
    """The request for one part; its files are named after `base`."""
    min_shapes, opt_shapes, max_shapes = (
        {name: shape for name, shape in shapes.items() if name in part.inputs}
        for shapes in (request.min_shapes, request.opt_shapes, request.max_shapes)
    )
    of_denoisers: dict[str, Any] = {}
    if manifest.task == DIFFUSE:
        call = manifest.settings["calls"][part.name]
        min_shapes = {**{name: tuple(least) for name, (least, _) in call["shapes"].items()}, **min_shapes}
        largest = {name: tuple(most) for name, (_, most) in call["shapes"].items()}
        opt_shapes, max_shapes = {**largest, **opt_shapes}, {**largest, **max_shapes}
        if call["is_denoiser"]:
            of_denoisers = {"is_denoiser": True, "kinds": request.kinds or ALL_KINDS}
    packed = packed_of(exported, part.name)
    if packed.is_file() and request.precision in ("auto", "nvfp4"):
        of_denoisers["packed_weights"] = packed
    known = manifest.settings.get("embeds")
    if known is not None and IDS in part.inputs:  # as many tokens as there are positions
        longest = int(known["longest"])
        shortest = longest if known["padding"] is not None else 1
        for name in part.inputs:
            min_shapes = {name: (1, shortest), **min_shapes}
            opt_shapes = {name: (1, longest), **opt_shapes}
            max_shapes = {name: (request.max_batch or RANGES["batch"][1][2], longest), **max_shapes}
    if part.name == "embed":  # as many tokens as the decoder behind it takes
        decoder = decoder_of_parts(exported)
        usual = min(RANGES["sequence"][1][1], decoder.capacity)
        min_shapes = {IDS: (1, 1), **min_shapes}
        opt_shapes = {IDS: (1, usual), **opt_shapes}
        max_shapes = {IDS: (decoder.max_batch, decoder.capacity), **max_shapes}
    return part_of(
        request,
        exported / f"{part.name}.onnx",
        base,
        min_shapes=min_shapes,
        opt_shapes=opt_shapes,
        max_shapes=max_shapes,
        calib_data=None if samples is None else samples / base.name,
        is_part=True,
        embed_plugins=False,  # once for all parts, beside them
        image_size=None,
        pipeline_arguments=None,
        **of_denoisers,
    )
