"""Checkpoints of published shapes with random weights, written without holding or drawing more than a block of them."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

SHARD_BYTES = 5 * 10**9 // 2
_BLOCK = 1 << 24
# So that no two tensors begin alike.
_STEP = 4099 * 8
_WIDTH = 0.02
_BYTES = {"BF16": 2, "U8": 1, "F8_E4M3": 1, "F32": 4}
# A block of NVFP4 values times scales of 0.25 to 3.5 has about this deviation.
_OF_NVFP4 = 4.5


@dataclass(frozen=True)
class Entry:
    """One tensor: its name, its type as safetensors calls it, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


def write_checkpoint(config: Any, model_class: Any, folder: Path, in_nvfp4: bool) -> int:
    """`config` and random weights of its model, in bfloat16, or as ModelOpt publishes NVFP4 (all linears but head and
    routers); returns the bytes of the largest shard."""
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {key: tuple(tensor.shape) for key, tensor in model_class(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    entries = [entry for key, shape in shapes.items() for entry in _entries(key, shape, in_nvfp4)]
    if in_nvfp4:
        left = ["lm_head", "model.layers.*.mlp.gate"]
        quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": left}
        content = {"producer": {"name": "modelopt"}, "quantization": quantization}
        (folder / "hf_quant_config.json").write_text(json.dumps(content))
    fill, weight_map = _Fill(), {}
    for number, shard in enumerate(_shards(entries)):
        file = folder / f"model-{number:05}.safetensors"
        with file.open("wb") as out:
            _write(shard, out, fill)
        weight_map |= {entry.name: file.name for entry in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


def _entries(key: str, shape: tuple[int, ...], in_nvfp4: bool) -> Iterator[Entry]:
    """The tensors that files hold of a parameter: experts apart, which models stack."""
    prefix, _, name = key.rpartition(".")
    if prefix.endswith(".experts") and len(shape) == 3:
        experts, rows, columns = shape
        parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
        for expert in range(experts):
            for part in parts:
                yield from _linear(f"{prefix}.{expert}.{part}", (rows // len(parts), columns), in_nvfp4)
    elif in_nvfp4 and prefix.endswith("_proj") and name == "weight":
        yield from _linear(prefix, (shape[0], shape[1]), in_nvfp4)
    else:
        yield Entry(key, "BF16", shape)


def _linear(module: str, shape: tuple[int, int], in_nvfp4: bool) -> Iterator[Entry]:
    rows, columns = shape
    if not in_nvfp4:
        yield Entry(f"{module}.weight", "BF16", shape)
        return
    yield Entry(f"{module}.weight", "U8", (rows, columns // 2))
    yield Entry(f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16))
    yield Entry(f"{module}.weight_scale_2", "F32", ())
    yield Entry(f"{module}.input_scale", "F32", ())


def _shards(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    size = 0
    for entry in entries:
        if size + entry.nbytes > SHARD_BYTES and shard:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.nbytes
    yield shard


class _Fill:
    """Bytes of random values: a block of each type, repeated from another place for each tensor."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        normal = torch.empty(_BLOCK // 2).normal_(0, _WIDTH, generator=generator).bfloat16()
        codes = torch.randint(0, 256, (_BLOCK,), dtype=torch.uint8, generator=generator)
        scales = torch.rand(_BLOCK, generator=generator) * 3.25 + 0.25
        blocks = {"BF16": normal, "U8": codes, "F8_E4M3": scales.to(torch.float8_e4m3fn)}
        self._blocks = {name: block.view(torch.uint8).numpy().data for name, block in blocks.items()}
        self._count = 0

    def write(self, entry: Entry, out: BinaryIO) -> None:
        self._count += 1
        if entry.dtype == "F32":
            out.write(torch.tensor(0.01 if "input" in entry.name else _WIDTH / _OF_NVFP4).numpy().tobytes())
            return
        block, left = self._blocks[entry.dtype], entry.nbytes
        at = self._count * _STEP % _BLOCK
        while left:
            piece = block[at : at + left]
            out.write(piece)
            left, at = left - len(piece), 0


def _write(shard: list[Entry], out: BinaryIO, fill: _Fill) -> None:
    """A safetensors file: the length of a header in JSON, the header, the values."""
    header, at = {}, 0
    for entry in shard:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for entry in shard:
        fill.write(entry, out)
