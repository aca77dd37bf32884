"""Measures the peak memory of building from bf16 safetensors: random decoders of published shapes, from the directory
to the rewritten model, each in a process of its own.

    python -m benchmarks.models.memory 1b 4b --folder /data/scratch
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

RECORD = Path(__file__).parents[1] / "results" / "models" / "memory.json"
#: Layers, hidden and intermediate sizes, heads, heads of keys and values, vocabulary, tied head.
SHAPES = {
    "1b": ("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 128256, True),
    "4b": ("Qwen3-4B", 36, 2560, 9728, 32, 8, 151936, True),
    "8b": ("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128256, False),
}
SHARD_BYTES = 5 * 10**9 // 2


def write_directory(name: str, folder: Path) -> int:
    """A directory with random weights in shards; returns the bytes of the largest."""
    import transformers

    _, layers, hidden, intermediate, heads, kv_heads, vocabulary, tied = SHAPES[name]
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128 if name != "1b" else 64,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {key: tensor.shape for key, tensor in transformers.LlamaForCausalLM(config).state_dict().items()}
    if tied:
        del shapes["lm_head.weight"]
    weight_map = {}
    for index, keys in enumerate(_shards(shapes)):
        file = f"model-{index:05}.safetensors"
        save_file({key: torch.empty(shapes[key], dtype=torch.bfloat16).normal_(0, 0.02) for key in keys}, folder / file)
        weight_map |= dict.fromkeys(keys, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


def _shards(shapes: dict[str, torch.Size]) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for key, shape in shapes.items():
        if size + 2 * shape.numel() > SHARD_BYTES and shard:
            yield shard
            shard, size = [], 0
        shard.append(key)
        size += 2 * shape.numel()
    yield shard


def measure(name: str, scratch: Path) -> dict[str, object]:
    """One build, up to the rewritten model; its peak is that of its largest process, as /usr/bin/time reports it."""
    folder = scratch / f"memory-{name}"
    folder.mkdir()
    try:
        # In another process: the peak of children counts all of them.
        code = (
            "import benchmarks.models.memory as m, pathlib; "
            f"print(m.write_directory({name!r}, pathlib.Path({str(folder)!r})))"
        )
        root = Path(__file__).parents[2]
        written = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
        shard = int(written.stdout.split()[-1])
        command = [Path(sys.executable).with_name("build-engine"), folder, "--target", "rtx-blackwell"]
        command += ["-o", folder / "o.engine", "--task", "generate", "--stop-after", "rewrite", "--recipe", "max"]
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{name}: build-engine failed ({os.waitstatus_to_exitcode(status)})")
        return {
            "model": SHAPES[name][0],
            "weights_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            "largest_shard_bytes": shard,
            "peak_bytes": usage.ru_maxrss * 1024,
            "seconds": round(time.monotonic() - start),
        }
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=SHAPES)
    parser.add_argument("--folder", type=Path, required=True, help="on a disk with four times the model's size free")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"runs": {}}
    for name in arguments.names:
        record["runs"][name] = measure(name, arguments.folder)
        record["machine"] = f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(record["runs"][name])


if __name__ == "__main__":
    main()
