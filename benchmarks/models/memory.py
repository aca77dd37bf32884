"""Measures the peak memory of building from safetensors: random decoders of published shapes, in bfloat16 or as
ModelOpt publishes NVFP4, from the directory to the rewritten model or a bundle, each in processes of its own.

    python -m benchmarks.models.memory 1b 4b --folder /data/scratch
    python -m benchmarks.models.memory 30b-a3b-nvfp4 --folder /data/scratch --bundle
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.random_checkpoint import write_checkpoint

RECORD = Path(__file__).parents[1] / "results" / "models" / "memory.json"


@dataclass(frozen=True)
class Shape:
    """A published model's sizes: what its configuration states."""

    model: str
    sizes: Mapping[str, Any]
    family: str = "Llama"
    in_nvfp4: bool = False

    def config(self, transformers: Any) -> Any:
        return getattr(transformers, f"{self.family}Config")(
            **self.sizes,
            max_position_embeddings=4096,
            dtype="bfloat16",
            architectures=[f"{self.family}ForCausalLM"],
        )


def _llama(
    layers: int, hidden: int, intermediate: int, kv: int, vocabulary: int, tied: bool, head: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": 32,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "head_dim": head,
    }


def _mixture(layers: int) -> dict[str, Any]:
    return {
        **_llama(layers, 2048, 6144, 4, 151936, False, 128),
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }


_8B = _llama(32, 4096, 14336, 8, 128256, False, 128)
SHAPES = {
    "1b": Shape("Llama-3.2-1B", _llama(16, 2048, 8192, 8, 128256, True, 64)),
    "4b": Shape("Qwen3-4B", _llama(36, 2560, 9728, 8, 151936, True, 128)),
    "8b": Shape("Llama-3.1-8B", _8B),
    "8b-nvfp4": Shape("Llama-3.1-8B in NVFP4", _8B, in_nvfp4=True),
    "30b-a3b-nvfp4": Shape("Qwen3-30B-A3B in NVFP4", _mixture(48), "Qwen3Moe", True),
    "4-layers-nvfp4": Shape("4 layers of Qwen3-30B-A3B in NVFP4", _mixture(4), "Qwen3Moe", True),
}


def write_directory(name: str, folder: Path) -> int:
    """A directory with random weights in shards; returns the bytes of the largest."""
    import transformers

    shape = SHAPES[name]
    config = shape.config(transformers)
    return write_checkpoint(config, getattr(transformers, f"{shape.family}ForCausalLM"), folder, shape.in_nvfp4)


def measure(name: str, scratch: Path, to_bundle: bool) -> dict[str, object]:
    """One build, up to the rewritten model or a bundle for Thor; its peak is that of its largest process, as
    /usr/bin/time reports it."""
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
        command = [Path(sys.executable).with_name("build-engine"), folder, "--task", "generate", "--recipe", "max"]
        if to_bundle:
            command += ["--target", "thor", "--bundle", folder / "bundle"]
        else:
            command += ["--target", "rtx-blackwell", "-o", folder / "o.engine", "--stop-after", "rewrite"]
        start = time.monotonic()
        process, held, disk = subprocess.Popen(command, stdout=subprocess.DEVNULL), _disk_bytes(folder), 0
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            disk = max(disk, _disk_bytes(folder) - held)
            time.sleep(1)
        _, status, usage = ended
        if status:
            raise SystemExit(f"{name}: build-engine failed ({os.waitstatus_to_exitcode(status)})")
        written_bytes = _disk_bytes(folder) - held
        return {
            "model": SHAPES[name].model,
            "to": "bundle" if to_bundle else "rewritten model",
            "weights_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            "largest_shard_bytes": shard,
            "written_bytes": written_bytes,
            "disk_bytes": max(disk, written_bytes),
            "peak_bytes": usage.ru_maxrss * 1024,
            "summary_peak_bytes": json.loads(next(folder.glob("*.report.json")).read_text())["peak_rss_bytes"],
            "seconds": round(time.monotonic() - start),
        }
    finally:
        shutil.rmtree(folder)


def _disk_bytes(folder: Path) -> int:
    """What the files of `folder` take on the disk, each once, as many names as it may have."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                stat = (Path(parent) / name).lstat()
                found[stat.st_ino] = stat.st_blocks * 512
    return sum(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=SHAPES)
    parser.add_argument("--folder", type=Path, required=True, help="on a disk with twice the model's size free")
    parser.add_argument("--bundle", action="store_true", help="as far as a bundle for Thor")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"runs": {}}
    for name in arguments.names:
        record["runs"][name] = measure(name, arguments.folder, arguments.bundle)
        record["machine"] = f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(record["runs"][name])


if __name__ == "__main__":
    main()
