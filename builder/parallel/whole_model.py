"""Tensor scales of weights and statistics of activations, which ranks take from the model that was split.

Each rank has a part of a weight's rows or columns, and of the activations that down and output projections read. A
tensor scale follows from the largest magnitude, which is that of the whole weight or row if it is the largest of all
ranks'. Statistics come from all ranks in one graph, in which sums over ranks are computed.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

import onnx

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.parallel.manifest import RANK, note
from trt_nvfp4.builder.parallel.shard import Rank
from trt_nvfp4.builder.parallel.simulate import prefix, save_simulated
from trt_nvfp4.builder.terminal.progress import Progress
from trt_nvfp4.calibration.samples.filled_caches import Continuation, with_filled_caches
from trt_nvfp4.calibration.samples.samples import Sample
from trt_nvfp4.calibration.statistics.collection import digest
from trt_nvfp4.calibration.statistics.statistics import Statistics, collect
from trt_nvfp4.common.onnx_files import OnnxFile
from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.patterns.find import find_subgraphs
from trt_nvfp4.graph_passes.planning.plan import Plan
from trt_nvfp4.graph_passes.rewrite import calibration_tensors
from trt_nvfp4.graph_passes.weights.whole_amax import KEY, Magnitudes, magnitudes, text_of


def share_magnitudes(paths: Sequence[Path], ranks: Sequence[Rank]) -> None:
    """Note in the exported ONNX file of every rank the largest magnitudes of the whole weights, and which model's rank
    it is. Ranks have the same weights in the same order, under names that may differ. Raises ModelFaultError for
    ranks whose weights do not correspond."""
    own = [magnitudes(load(path).graph) for path in paths]
    for path, found in zip(paths, own, strict=True):
        if [len(values) for values in found.values()] != [len(values) for values in own[0].values()]:
            raise ModelFaultError(f"{path}: its weights are not those of {paths[0].name} (a defect)")
    # Ranks of another share have other experts of a stack.
    members = {rank.share: [other.index for other in ranks if other.share == rank.share] for rank in ranks}
    everyone = list(range(len(ranks)))
    known = {share: [_largest(rows, members[share], everyone) for rows in _by_weight(own)] for share in members}
    model = hashlib.blake2b(json.dumps(sorted(known.items())).encode(), digest_size=16).hexdigest()
    for path, rank, found in zip(paths, ranks, own, strict=True):
        proto = onnx.load(path, load_external_data=False)
        whole = dict(zip(found, known[rank.share], strict=True))
        for key, value in {KEY: text_of(whole), RANK: note(rank.index, rank.count, model)}.items():
            proto.metadata_props.add(key=key, value=value)
        with replacing(path) as temporary:
            onnx.save(proto, temporary)


def _by_weight(own: Sequence[Magnitudes]) -> Iterator[list[Sequence[float]]]:
    """For every weight, what each rank has of it."""
    for rows in zip(*(found.values() for found in own), strict=True):
        yield list(rows)


def _largest(rows: Sequence[Sequence[float]], members: Sequence[int], everyone: Sequence[int]) -> list[float]:
    """The largest magnitudes of one weight, over the ranks that have a part of it."""
    sharing = everyone if len(rows[0]) == 1 else members
    return [max(values) for values in zip(*(rows[index] for index in sharing), strict=True)]


def calibrate_ranks(
    paths: Sequence[Path],
    plans: Sequence[Plan],
    samples: Iterable[Sample],
    folder: Path,
    progress: Progress,
) -> list[Path]:
    """Statistics of the tensors that each rank's plan can use, in a file for each in `folder`; none where there is no
    such tensor. `samples` are one rank's.

    A tensor's largest magnitude is that of all ranks': ranks read the same tensor, or parts of one row.
    """
    found = [find_subgraphs(load(path)) for path in paths]
    wanted = [calibration_tensors(plan, subgraphs) for plan, subgraphs in zip(plans, found, strict=True)]
    if not any(wanted):
        return []
    together = folder / "together.onnx"
    save_simulated(paths, together)
    names = {prefix(rank) + name: kinds for rank, own in enumerate(wanted) for name, kinds in own.items()}
    statistics = collect(together, names, _of_all_ranks(samples, len(paths)), progress=progress.step)
    largest = _largest_of_all(statistics, plans)
    files = []
    for rank, path in enumerate(paths):
        files.append(folder / f"rank{rank}.statistics.json")
        _of_rank(statistics, rank, wanted[rank], largest, digest(OnnxFile(path))).save(files[-1])
    return files


def _largest_of_all(statistics: Statistics, plans: Sequence[Plan]) -> dict[str, float]:
    """By the prefixed name of every rank's tensor: of all that take its place in the ranks' plans, whose names may
    differ."""
    places: dict[tuple[str, int], set[str]] = {}
    for rank, plan in enumerate(plans):
        for entry in plan.subgraphs:
            for position, name in enumerate(entry.linear_inputs):
                if (full := prefix(rank) + name) in statistics.amax:
                    places.setdefault((entry.name, position), set()).add(full)
    largest = dict(statistics.amax)
    for names in places.values():
        most = max(statistics.amax[name] for name in names)
        largest |= {name: max(largest[name], most) for name in names}
    return largest


def _of_rank(
    found: Statistics, rank: int, wanted: Iterable[str], largest: Mapping[str, float], model: str
) -> Statistics:
    own = {name: prefix(rank) + name for name in wanted}
    amax = {name: largest[full] for name, full in own.items()}
    arrays = {name: found.arrays[full] for name, full in own.items() if full in found.arrays}
    rows = {name: found.rows[full] for name, full in own.items() if full in found.rows}
    return Statistics(amax, found.samples, arrays, model, rows)


def _of_all_ranks(samples: Iterable[Sample], ranks: int) -> Iterable[Sample]:
    """Each sample for all ranks, over empty and over filled caches; counted where `samples` are."""
    filled = with_filled_caches(samples)
    return _CountedForRanks(filled, ranks) if isinstance(filled, Sized) else _ForRanks(filled, ranks)


@dataclass(frozen=True)
class _ForRanks:
    samples: Iterable[Sample]
    ranks: int

    def __iter__(self) -> Iterator[Sample]:
        for sample in self.samples:
            if isinstance(sample, Continuation):
                yield Continuation(self._named(sample.first), self._named(sample))
            else:
                yield self._named(sample)

    def _named(self, sample: Sample) -> Sample:
        return {prefix(rank) + name: array for rank in range(self.ranks) for name, array in sample.items()}


class _CountedForRanks(_ForRanks):
    def __len__(self) -> int:
        assert isinstance(self.samples, Sized)
        return len(self.samples)
