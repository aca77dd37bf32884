"""What ranks take from the model that was split: tensor scales of weights, and statistics of activations.

Each rank has a part of a weight's rows or columns, and of the activations that down and output projections read. A
tensor scale follows from the largest magnitude, which is that of the whole weight or row if it is the largest of all
ranks'. Statistics come from all ranks in one graph, in which sums over ranks are computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

import onnx

from trt_nvfp4.builder.errors import MODEL_AT_FAULT, BuilderError
from trt_nvfp4.builder.parallel.manifest import RANK, note
from trt_nvfp4.builder.parallel.shard import Rank
from trt_nvfp4.builder.parallel.simulate import prefix, save_simulated
from trt_nvfp4.builder.pipeline.progress import Progress
from trt_nvfp4.calibration.samples.filled_caches import Continuation, with_filled_caches
from trt_nvfp4.calibration.samples.samples import Sample
from trt_nvfp4.calibration.statistics.collection import digest
from trt_nvfp4.calibration.statistics.statistics import Statistics, collect
from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.graph_passes.load.source import load
from trt_nvfp4.graph_passes.weights.whole_amax import KEY, Magnitudes, magnitudes, text_of


def share_magnitudes(paths: Sequence[Path], ranks: Sequence[Rank]) -> None:
    """Note in the exported ONNX file of every rank the largest magnitudes of the whole weights, and which model's rank
    it is. Raises BuilderError (model) for ranks whose weights do not correspond."""
    own = [magnitudes(load(path).graph) for path in paths]
    for path, found in zip(paths, own, strict=True):
        if {name: len(values) for name, values in found.items()} != {n: len(v) for n, v in own[0].items()}:
            raise BuilderError(MODEL_AT_FAULT, f"{path}: its weights are not those of {paths[0].name} (a defect)")
    # Of stacked experts, ranks of another share have others.
    shares = {rank.share: [other.index for other in ranks if other.share == rank.share] for rank in ranks}
    everyone = list(range(len(ranks)))
    known: dict[int, Magnitudes] = {
        share: {
            name: _largest([own[index][name] for index in (everyone if len(values) == 1 else members)])
            for name, values in own[0].items()
        }
        for share, members in shares.items()
    }
    model = hashlib.blake2b(json.dumps(sorted(known.items())).encode(), digest_size=16).hexdigest()
    for path, rank in zip(paths, ranks, strict=True):
        proto = onnx.load(path, load_external_data=False)
        entries = {KEY: text_of(known[rank.share]), RANK: note(rank.index, rank.count, model)}
        for key, value in entries.items():
            proto.metadata_props.add(key=key, value=value)
        with replacing(path) as temporary:
            onnx.save(proto, temporary)


def _largest(rows: Sequence[Sequence[float]]) -> list[float]:
    return [max(values) for values in zip(*rows, strict=True)]


def calibrate_ranks(
    paths: Sequence[Path],
    wanted: Sequence[Mapping[str, frozenset[str]]],
    samples: Iterable[Sample],
    folder: Path,
    progress: Progress,
) -> list[Path]:
    """Statistics of the tensors that each rank wants, in a file for each in `folder`. `samples` are one rank's.

    A tensor's largest magnitude is that of all ranks': ranks read the same tensor, or parts of one row.
    """
    together = folder / "together.onnx"
    save_simulated(paths, together)
    names = {prefix(rank) + name: kinds for rank, own in enumerate(wanted) for name, kinds in own.items()}
    found = collect(together, names, _of_all_ranks(samples, len(paths)), progress=progress.step)
    files = []
    for rank, path in enumerate(paths):
        files.append(folder / f"rank{rank}.statistics.json")
        _of_rank(found, rank, wanted, digest(path)).save(files[-1])
    return files


def _of_rank(found: Statistics, rank: int, wanted: Sequence[Mapping[str, frozenset[str]]], model: str) -> Statistics:
    own = {name: prefix(rank) + name for name in wanted[rank]}
    amax = {
        name: max(found.amax[prefix(other) + name] for other, names in enumerate(wanted) if name in names)
        for name in own
    }
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
