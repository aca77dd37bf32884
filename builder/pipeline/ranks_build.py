"""Builds one engine, or one bundle, for each rank of a Hugging Face model that is split over several GPUs."""

import re
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import onnx

from trt_nvfp4.builder.components.check import check_export, cosine
from trt_nvfp4.builder.errors import BuilderError, UsageError
from trt_nvfp4.builder.export.huggingface import config_of, export
from trt_nvfp4.builder.export.tokenizer_files import copy_tokenizer
from trt_nvfp4.builder.model.decoder_contract import IDS, LOGITS, NEW_LENGTH, PAST_LENGTH, TOKENIZER, CacheOptions
from trt_nvfp4.builder.model.model_files import is_model_directory
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.parallel.manifest import MOST_RANKS, RankFolder, rank_name
from trt_nvfp4.builder.parallel.prediction import predict
from trt_nvfp4.builder.parallel.shard import Rank, check_division
from trt_nvfp4.builder.parallel.simulate import prefix, simulated
from trt_nvfp4.builder.parallel.whole_model import calibrate_ranks, share_magnitudes
from trt_nvfp4.builder.pipeline import pipeline
from trt_nvfp4.builder.pipeline.request import Request, part_of, planned
from trt_nvfp4.builder.pipeline.request_checks import check_parts, check_texts
from trt_nvfp4.builder.report.parts_report import PartsReport
from trt_nvfp4.builder.report.whole_folder import rename_in_reports, whole_folder
from trt_nvfp4.builder.terminal.progress import Named, Progress, Silent
from trt_nvfp4.calibration.samples.python_loader import split_function
from trt_nvfp4.calibration.samples.samples import input_specs, load_samples
from trt_nvfp4.calibration.statistics.store import is_statistics
from trt_nvfp4.common.metrics import relative_error
from trt_nvfp4.common.model_config import read_config
from trt_nvfp4.common.replacing import made_folder, scratch
from trt_nvfp4.graph_passes.planning.plan import Plan

# A graph of all ranks is one protobuf, which ends at 2 GiB.
_MOST_BYTES = 1 << 30
#: What configurations call the experts that a token chooses.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


def ranks_of(parallel: str) -> list[Rank]:
    """The ranks that `--parallel` asks for. Raises UsageError."""
    found = re.fullmatch(r"tp=(\d{1,3})(?:,ep=(\d{1,3}))?", parallel.strip())
    if found is None or not 2 <= int(found[1]) <= MOST_RANKS:
        raise UsageError(
            f"--parallel {parallel}: expected tp=N or tp=N,ep=M with N from 2 to {MOST_RANKS}, the number of GPUs"
        )
    count, spread = int(found[1]), int(found[2] or 1)
    if not spread or count % spread:
        raise UsageError(
            f"--parallel {parallel}: ep, over how many ranks the experts are spread, must divide tp={count}"
        )
    return [Rank(index, count, spread) for index in range(count)]


def run(request: Request, parallel: str, progress: Progress | None = None) -> PartsReport:
    """Export and build the share of every rank of `request.model`, into the folder of `-o` or `--bundle`.

    The ranks as exported are compared with the whole model, and as rewritten with those. Raises what `pipeline.run`
    raises.
    """
    progress = progress or Silent()
    ranks = ranks_of(parallel)
    _check(request, parallel)
    destination = request.bundle or request.output
    assert destination is not None
    if destination.exists() and any(destination.iterdir() if destination.is_dir() else [destination]):
        raise UsageError(f"{destination}: exists already; name a new folder")
    report = PartsReport(str(request.model), request.target.name, str(destination))
    cache = CacheOptions(request.cache_capacity, request.max_batch or 1)
    with made_folder(destination.parent), scratch(destination.parent) as temporary, whole_folder(destination) as folder:
        own = (request.trust_remote_code, request.adapter)
        whole = export(request.model, temporary / "whole.onnx", "generate", cache, *own)
        exported = []
        for rank in ranks:
            progress.stage(f"exporting rank {rank.index} of {rank.count}")
            file = temporary / f"rank{rank.index}.onnx"
            exported.append(export(request.model, file, "generate", cache, *own, rank))
        progress.stage("comparing the ranks with the whole model")
        expected = _logits(whole, "") if _is_small(exported) else None
        if expected is None:
            report.warnings.append("the ranks are too large to be run together here: they were not compared")
        else:
            found = _together(exported, temporary / "exported.onnx")
            report.chain["export_error"] = check_export(str(request.model), [expected], [found], _in_16_bits(whole))
        share_magnitudes(exported, ranks)
        copy_tokenizer(request.model, folder / TOKENIZER)  # which each rank's bundle takes from there
        own_changes = {"calib_data": None, "accuracy_samples": 0, "parallel": None}
        requests = [
            part_of(request, file, folder / rank_name(index), **own_changes) for index, file in enumerate(exported)
        ]
        if request.calib_data is not None:
            requests = _calibrated(request, requests, exported, temporary, progress)
        for index, one in enumerate(requests):
            report.parts[rank_name(index)] = pipeline.run(one, Named(progress, rank_name(index)))
        if expected is not None:
            progress.stage("comparing the rewritten ranks")
            rewritten = [Path(part.files["rewritten model"]) for part in report.parts.values()]
            found = _together(rewritten, temporary / "rewritten.onnx")
            report.chain |= {
                "cosine": cosine([expected], [found]),
                "error": relative_error(found=[found], expected=[expected]),
            }
        first = next(iter(report.parts.values()))
        products = [] if first.predicted is None else first.predicted["subgraphs"]
        report.ranks = predict(request.target.name, ranks[0], products, exported[0], _top_k(request.model))
        report.take_warnings()
        rename_in_reports(report, folder, destination)
        RankFolder(folder, request.target.name, len(ranks), ranks[0].spread, report.ranks).save()
    return report


def _calibrated(
    request: Request, requests: Sequence[Request], exported: Sequence[Path], temporary: Path, progress: Progress
) -> list[Request]:
    """The ranks' requests with a plan and statistics: those of the ranks' tensors while all of them run together."""
    assert request.calib_data is not None
    plans = []
    for one in requests:
        progress.stage(f"planning {one.model.stem}")
        found = pipeline.run(attrs.evolve(one, calib_data=request.calib_data, stop_after="plan"))
        plans.append(Path(found.files["plan"]))
    progress.stage("calibrating all ranks")
    samples = load_samples(
        request.calib_data, input_specs(exported[0]), request.model, request.trust_remote_code, request.calib_samples
    )
    files = calibrate_ranks(exported, [Plan.load(plan) for plan in plans], samples, temporary, progress)
    if not files:
        return [planned(one, plan) for one, plan in zip(requests, plans, strict=True)]
    return [
        planned(attrs.evolve(one, calib_data=file), plan)
        for one, plan, file in zip(requests, plans, files, strict=True)
    ]


def _check(request: Request, parallel: str) -> None:
    flag = f"--parallel {parallel}"
    if not is_model_directory(request.model):
        raise UsageError(
            f"{flag}: {request.model} is not a Hugging Face directory; a model is split where it is exported"
        )
    if request.calib_data is not None and is_statistics(request.calib_data):
        raise UsageError(
            f"--calib-data {request.calib_data}: statistics are of one graph, and {flag} makes several; give the input "
            "samples"
        )
    if request.calib_data is not None and not split_function(request.calib_data)[0].exists():
        raise UsageError(f"--calib-data {request.calib_data}: no such file or folder")
    check_texts(request)
    _check_division(request, ranks_of(parallel)[0])
    check_parts(request, f"has no use with {flag}; leave it out")


def _check_division(request: Request, rank: Rank) -> None:
    try:
        config = config_of(request.model, request.trust_remote_code)
    except BuilderError:
        raise
    except Exception:  # of any kind: loading the model, which comes next, says what is wrong
        return
    check_division(config, rank, str(request.model))


def _top_k(directory: Path) -> int | None:
    """Experts that a token chooses, by the model's configuration."""
    config = read_config(directory)
    text = config.get("text_config")  # of a model that reads other things too
    places = (config, text) if isinstance(text, dict) else (config,)
    found = next((place[key] for place in places for key in _TOP_K if key in place), None)
    return found if type(found) is int and found > 0 else None


def _is_small(paths: list[Path]) -> bool:
    data = (
        file.stat().st_size for path in paths for file in (path, path.with_name(path.name + ".data")) if file.exists()
    )
    return sum(data) < _MOST_BYTES


def _in_16_bits(path: Path) -> bool:
    types = {value.type.tensor_type.elem_type for value in onnx.load(path, load_external_data=False).graph.output}
    return onnx.TensorProto.FLOAT not in types


def _together(paths: list[Path], file: Path) -> np.ndarray:
    """The first rank's logits, of all ranks run as one graph."""
    onnx.save(simulated(paths), file)
    return _logits(file, prefix(0))


def _logits(path: Path, named: str) -> np.ndarray:
    """Logits of a prompt of random tokens, over empty caches."""
    runner = session(path)
    tokens = np.random.default_rng(0).integers(3, 50, (1, 5))
    feeds = {}
    for port in runner.get_inputs():
        own = port.name.partition(".")[2] if named else port.name
        if own == IDS:
            feeds[port.name] = tokens
        elif own in (PAST_LENGTH, NEW_LENGTH):
            feeds[port.name] = np.array([0 if own == PAST_LENGTH else 5], np.int64)
        else:
            feeds[port.name] = np.zeros([1, *port.shape[1:]], np.float32)
    (logits,) = runner.run([named + LOGITS], feeds)
    found: np.ndarray = logits
    return found
