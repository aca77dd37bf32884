"""Input samples from files, checked against the model's inputs one by one as they are read."""

import itertools
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from trt_nvfp4.calibration.samples import python_loader, text
from trt_nvfp4.common.cache_names import is_past, is_state
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.json_text import check_memory, check_ordinary, read_npz
from trt_nvfp4.common.replacing import replacing
from trt_nvfp4.plugins.ops.definition import shapes_fit

Sample = dict[str, np.ndarray]
# What exporters call dimensions of which they know nothing; two of one such name need not be equal.
_NO_NAMES = frozenset({"", "?", "*", "-1", "None", "unknown"})
# What exporters call the inputs of a decoder's cache. It may be empty: before the first token it is.
CACHE = re.compile(r"past|cache", re.IGNORECASE)

_COPIES = 4  # of a sample in memory: as it is read, checked, fed, and what the network makes of it


@dataclass(frozen=True)
class InputSpec:
    """A model input: its shape (names for dynamic dimensions, "" for those without one) and its NumPy type.
    bfloat16 inputs take float32 samples."""

    shape: tuple[int | str, ...]
    dtype: np.dtype


def input_specs(model: str | Path | onnx.ModelProto) -> dict[str, InputSpec]:
    """The inputs of an ONNX file, or of one that has been read, by name; its weights are not read."""
    graph = (model if isinstance(model, onnx.ModelProto) else onnx.load(model, load_external_data=False)).graph
    constants = {tensor.name for tensor in graph.initializer}
    return {
        value.name: InputSpec(
            tuple(map(dimension, value.type.tensor_type.shape.dim)),
            _sample_dtype(value.type.tensor_type.elem_type),
        )
        for value in graph.input
        if value.name not in constants
    }


def load_samples(
    path: str | Path,
    specs: Mapping[str, InputSpec],
    tokenizer: str | Path | None = None,
    trust_remote_code: bool = False,
    most: int | None = None,
) -> Iterable[Sample]:
    """Samples for a model with the inputs `specs`, read one at a time; `len` tells how many where that is known.

    `most`: how many at most, evenly drawn; the first ones of a Python loader, whose number is not known.

    `path` is one of: an .npz file, one sample, arrays by input name; a folder of .npz files, one sample each; a folder
    with one .npy file per input, named as the input ("/" as "_"), samples along the first axis, each keeping it with
    length 1; a .json file of Polygraphy (`--save-inputs`); a Python file and a function in it, `loader.py:function`
    (`load_data` where none is named, as in Polygraphy), that returns an iterable of samples; a .txt or .jsonl file,
    tokenized by the tokenizer in the folder `tokenizer`, the model's (see `calibration.text`); its own Python code runs
    only with `trust_remote_code`.

    Raises CalibrationError, naming file and input: nothing found, unreadable, a wrong or missing name, a shape or type
    that the input does not take, no values (but a decoder's cache may be empty), NaN or Inf,
    dimensions of one name and several sizes.
    """
    file, function = python_loader.split_function(Path(path))
    if not file.exists():
        raise CalibrationError(f"{file}: no such file or folder of calibration samples")
    if file.suffix == ".py":
        loaded = _Samples(path, specs, python_loader.load(file, function or python_loader.DEFAULT))
        return loaded if most is None else _First(loaded, most)
    read = _reader(file, specs, None if tokenizer is None else Path(tokenizer), trust_remote_code)
    count = len(read)
    if most is not None and count > most:
        read = [read[number * count // most] for number in range(most)]
    return _CountedSamples(path, specs, read, count)


def available(samples: Iterable[Sample]) -> int:
    """How many samples there were before some of them were drawn; 0 where that is not known."""
    if isinstance(samples, SampleRange):
        return available(samples.samples)
    return samples.available if isinstance(samples, _CountedSamples) else 0


def save_sample(file: Path, sample: Mapping[str, np.ndarray]) -> Path:
    """Write arrays by name as an .npz file, which `load_samples` reads back; returns its path.

    A name may be any: NumPy's own `savez` takes some for its arguments. Raises ValueError for arrays of objects.
    """
    with replacing(file) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in sample.items():
            # The size is not known before it is written.
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
    return file


@dataclass(frozen=True)
class SampleRange:
    """Samples from number `start` to before `stop`. Iterable any number of times."""

    samples: Iterable[Sample]
    start: int
    stop: int

    def __iter__(self) -> Iterator[Sample]:
        return itertools.islice(self.samples, self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class _First:
    """The first samples, `count` at most. Iterable any number of times."""

    samples: Iterable[Sample]
    count: int

    def __iter__(self) -> Iterator[Sample]:
        return itertools.islice(self.samples, self.count)


# Where a sample comes from, for messages, and what reads it.
Source = tuple[str, Callable[[], Mapping[str, np.ndarray]]]


@dataclass(frozen=True)
class _Samples:
    """Iterable any number of times."""

    path: str | Path
    specs: Mapping[str, InputSpec]
    sources: Iterable[Source]

    def __iter__(self) -> Iterator[Sample]:
        count = 0
        for where, read in self.sources:
            yield _checked(where, read(), self.specs)
            count += 1
        if not count:
            raise CalibrationError(f"{self.path}: holds no sample")


@dataclass(frozen=True)
class _CountedSamples(_Samples):
    """Samples whose number is known before they are read; `available`: of how many they were drawn."""

    sources: Sequence[Source]
    available: int

    def __len__(self) -> int:
        return len(self.sources)


def _reader(
    path: Path, specs: Mapping[str, InputSpec], tokenizer: Path | None, trust_remote_code: bool
) -> Sequence[Source]:
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        return [(str(file), partial(_npz, file)) for file in files] or _npy_folder(path, specs)
    if path.suffix == ".npz":
        return [(str(path), partial(_npz, path))]
    if path.suffix == ".json":
        return _polygraphy(path)
    if path.suffix in text.SUFFIXES:
        caches = _empty_caches(specs)
        inputs = {name: spec.dtype for name, spec in specs.items() if name not in caches}
        capacity = min((cache.shape[2] for name, cache in caches.items() if not is_state(name)), default=None)
        samples = text.tokenize(path, tokenizer, inputs, capacity, trust_remote_code)
        return [(f"{path}, sample {i}", partial(dict, sample | caches)) for i, sample in enumerate(samples)]
    raise CalibrationError(
        f"{path}: expected an .npz file, a folder of .npz or .npy files, a .json file of Polygraphy, a Python loader "
        "(loader.py:function), a .txt or a .jsonl file"
    )


def _empty_caches(specs: Mapping[str, InputSpec]) -> dict[str, np.ndarray]:
    """The caches of one sequence, [1, heads, capacity, dim], of a decoder whose caches have a fixed capacity, and its
    states."""
    return {
        name: np.zeros((1, *map(int, spec.shape[1:])), spec.dtype)
        for name, spec in specs.items()
        if is_past(name)
        and (len(spec.shape) == 4 or is_state(name))
        and all(isinstance(d, int) for d in spec.shape[1:])
    }


def _npz(file: Path) -> Sample:
    try:
        return read_npz(file, _COPIES)
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{file}: not a readable .npz file: {error}") from error


def _npy_folder(folder: Path, specs: Mapping[str, InputSpec]) -> Sequence[Source]:
    arrays = {}
    for name in specs:
        file = folder / f"{name.replace('/', '_')}.npy"
        if not file.exists():
            raise CalibrationError(f"{folder}: no .npz file, and no {file.name} for the input {name}")
        try:
            check_ordinary(file)
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # a header is Python's syntax, whose readers raise many kinds
            raise CalibrationError(f"{file}: not a readable .npy file: {error}") from error
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise CalibrationError(f"{folder}: the inputs have different numbers of samples: {counts}")

    def read(index: int) -> Sample:
        return {name: array[index : index + 1] for name, array in arrays.items()}

    return [(f"{folder}, sample {i}", partial(read, i)) for i in range(next(iter(counts.values()), 0))]


def _polygraphy(file: Path) -> Sequence[Source]:
    from polygraphy.json import load_json

    try:
        check_memory(_COPIES * check_ordinary(file))
        samples = load_json(str(file))
    except Exception as error:  # Polygraphy raises its own and the JSON reader's
        raise CalibrationError(f"{file}: not a Polygraphy input file: {error}") from error
    if not isinstance(samples, list) or not all(isinstance(sample, Mapping) for sample in samples):
        raise CalibrationError(
            f"{file}: expected a list of samples, each a mapping from input name to array (statistics of an earlier "
            "run are known by their name: OUT.statistics.json)"
        )
    sources = [(f"{file}, sample {i}", sample) for i, sample in enumerate(samples)]
    return [(where, partial(python_loader.arrays, where, sample)) for where, sample in sources]


def _checked(where: str, sample: Mapping[str, np.ndarray], specs: Mapping[str, InputSpec]) -> Sample:
    if sample.keys() != specs.keys():
        raise CalibrationError(
            f"{where}: the model's inputs are {sorted(specs)}, found arrays named {sorted(map(str, sample))}"
        )
    for name, array in sample.items():
        spec = specs[name]
        if array.dtype != spec.dtype:
            raise CalibrationError(f"{where}: {name} must be {spec.dtype}, found {array.dtype}")
        if not shapes_fit(array.shape, spec.shape):
            expected = ", ".join(str(d) or "?" for d in spec.shape)
            raise CalibrationError(f"{where}: {name} must have shape [{expected}], found {list(array.shape)}")
        if not array.size and not CACHE.search(name):
            raise CalibrationError(f"{where}: {name} is empty: it has shape {list(array.shape)}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            position = np.argwhere(~np.isfinite(array))[0].tolist()
            raise CalibrationError(f"{where}: {name}{position} is {array[tuple(position)]}; samples must be finite")
    _check_equal_names(where, sample, specs)
    return dict(sample)


def _check_equal_names(where: str, sample: Mapping[str, np.ndarray], specs: Mapping[str, InputSpec]) -> None:
    """Raise CalibrationError where dimensions of one name have several sizes, which neither the model nor TensorRT
    takes."""
    seen: dict[str, tuple[str, int]] = {}
    for name, spec in specs.items():
        for dim, size in zip(spec.shape, sample[name].shape, strict=True):
            if not isinstance(dim, str) or not dim:
                continue
            other, expected = seen.setdefault(dim, (name, size))
            if size != expected:
                raise CalibrationError(
                    f"{where}: dimension {dim} is {expected} in {other} and {size} in {name}; dimensions of one name "
                    "are equal"
                )


def dimension(dim: onnx.TensorShapeProto.Dimension) -> int | str:
    """A number, the name of a dynamic dimension, or "" where nothing is known of it."""
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else ""
    return "" if dim.dim_param in _NO_NAMES else dim.dim_param


def _sample_dtype(elem_type: int) -> np.dtype:
    if elem_type == onnx.TensorProto.BFLOAT16:
        return np.dtype(np.float32)
    return onnx.helper.tensor_dtype_to_np_dtype(elem_type)
