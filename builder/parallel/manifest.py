"""The file beside the ranks' engines: how many ranks there are, and what each is called."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.model.decoder_contract import decoder_of
from trt_nvfp4.builder.model.onnx_file import read
from trt_nvfp4.builder.parallel.prediction import RanksPrediction
from trt_nvfp4.builder.records.bundle import MANIFEST as BUNDLE
from trt_nvfp4.builder.records.json_types import misfits
from trt_nvfp4.common.collectives import is_collective
from trt_nvfp4.common.json_text import parse_json, read_json
from trt_nvfp4.common.replacing import replacing

FILE = "parallel.json"
FORMAT = 1
#: An entry of each rank's ONNX file: its number, how many there are, and what tells its model from others.
RANK = "trt_nvfp4.rank"
MOST_RANKS = 64


@dataclass(frozen=True)
class RankFolder:
    """Ranks of one model in `folder`: `count` of them, whose experts are spread over `spread` shares. `prediction`: of
    `parallel.prediction.predict`."""

    folder: Path
    target: str
    count: int
    spread: int = 1
    prediction: RanksPrediction | None = None

    @classmethod
    def read(cls, folder: Path) -> "RankFolder":
        """Raises ModelFaultError for a missing or invalid manifest."""
        path = folder / FILE
        try:
            found = read_json(path)
            if found["format"] != FORMAT:
                raise ValueError(f"its format is {found['format']!r}, expected {FORMAT}")
            count, spread, prediction = found["tp"], found["ep"], found.get("prediction")
            if type(count) is not int or not 2 <= count <= MOST_RANKS:
                raise ValueError(f"tp is {count!r}, expected 2 to {MOST_RANKS}")
            if type(spread) is not int or spread < 1 or count % spread:
                raise ValueError(f"ep is {spread!r}, expected a divisor of {count}")
            if prediction is not None and (wrong := misfits(prediction, RanksPrediction)):
                raise ValueError(f"its prediction's {wrong[0]}")
            known = None if prediction is None else RanksPrediction(**prediction)
            return cls(folder, str(found.get("target", "")), count, spread, known)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFaultError(f"{path}: no manifest of ranks ({error!r}); build them again") from error

    def save(self) -> None:
        content = {
            "format": FORMAT,
            "target": self.target,
            "tp": self.count,
            "ep": self.spread,
            "ranks": [rank_name(rank) for rank in range(self.count)],
            "prediction": None if self.prediction is None else asdict(self.prediction),
        }
        with replacing(self.folder / FILE) as file:
            file.write_text(json.dumps(content, indent=2) + "\n")

    def engine(self, rank: int) -> Path:
        """The engine of a rank; in its bundle, once it was built there."""
        bundle = self.folder / rank_name(rank)
        return bundle / "model.engine" if bundle.is_dir() else bundle.with_name(f"{bundle.name}.engine")

    def model(self, rank: int) -> Path:
        """The rewritten ONNX file of a rank."""
        bundle = self.folder / rank_name(rank)
        if not bundle.is_dir():
            return bundle.with_name(f"{bundle.name}.rewritten.onnx")
        try:
            return bundle / Path(str(read_json(bundle / BUNDLE)["model"])).name
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelFaultError(
                f"{bundle / BUNDLE}: no manifest of a bundle ({error!r}); build the ranks again"
            ) from error

    def models(self) -> list[Path]:
        """The rewritten ONNX files of all ranks, which fit together.

        Raises ModelFaultError, naming the file, for one that is missing or no rank, of another number or model,
        with other caches or other sums than the first.
        """
        paths = [self.model(rank) for rank in range(self.count)]
        for rank, path in enumerate(paths):
            if not path.is_file():
                raise ModelFaultError(
                    f"{self.folder}: the rewritten model of rank {rank} is missing ({path.name}); copy the whole folder"
                )
        first = _interface(paths[0], 0, self.count)
        for rank, path in enumerate(paths[1:], 1):
            found = _interface(path, rank, self.count)
            for what, own in found.items():
                if own != first[what]:
                    raise ModelFaultError(
                        f"{path}: does not fit {paths[0].name}: {what} differ; build all ranks together"
                    )
        return paths


def rank_name(rank: int) -> str:
    """The name of a rank's files."""
    return f"rank{rank}"


def note(rank: int, count: int, model: str) -> str:
    """The entry `RANK`; `model` is the same for all ranks of a model, and no other."""
    return json.dumps({"rank": rank, "of": count, "model": model})


def _interface(path: Path, rank: int, count: int) -> dict[str, Any]:
    """The properties that all ranks of a model share. Raises ModelFaultError for another file, or another rank's."""
    proto = read(path)
    noted = _noted(proto)
    decoder = decoder_of(proto)
    if not noted or decoder is None:
        raise ModelFaultError(f"{path}: not a rank of a split language model; build the ranks again")
    if (noted.get("rank"), noted.get("of")) != (rank, count):
        raise ModelFaultError(
            f"{path}: is rank {noted.get('rank')} of {noted.get('of')}, expected rank {rank} of {count}; copy the "
            "ranks' files under their own names"
        )
    return {
        "the models": noted.get("model"),
        "the caches": decoder.json(),
        "the sums over ranks": _sums(proto.graph.node),
    }


def _noted(proto: onnx.ModelProto) -> dict[str, Any]:
    text = next((entry.value for entry in proto.metadata_props if entry.key == RANK), "{}")
    try:
        found = parse_json(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _sums(nodes: Sequence[onnx.NodeProto]) -> list[int]:
    """Over how many ranks each collective adds up."""
    return [
        next((entry.i for entry in node.attribute if entry.name == "nb_rank"), 0)
        for node in nodes
        if is_collective(node)
    ]
