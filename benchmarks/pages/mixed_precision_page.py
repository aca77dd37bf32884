"""Writes docs/figures/float32.md: float32 networks in 16 bits, by us and by converters of others, as recorded."""

import argparse
import textwrap
from collections.abc import Iterator
from typing import Any

from benchmarks.pages.records import DOCS, load

PAGE = DOCS / "figures" / "float32.md"

INTRODUCTION = """# Float32 models

A float32 model is computed in BF16 unless `--activations` says otherwise; [Plans](../how_to/plans.md#float32-models)
lists what stays float32 and why. This page shows what that does to the outputs, and to which kernels and products an
engine gets. `python -m benchmarks.pages.mixed_precision_page` writes it from
[`mixed_precision.json`](../../benchmarks/results/accuracy/mixed_precision.json), which
`benchmarks/accuracy/mixed_precision.py` records. It needs no GPU: ONNX Runtime computes the outputs, every node's
result rounded to its type as on a GPU, and TensorRT-RTX builds the engines for RTX Blackwell.

Errors are |y - y32| / |y32| over the outputs of fresh inputs. Networks are small and have random weights, but for
MiniLM's, which are trained; `large` is an MLP with hidden values beyond 65504.

## BF16, and NVFP4 on top

*Torch*: the module itself after `.to(bfloat16)`. *NVFP4*: calibrated, MLPs on W4A4, the rest in BF16. *Float32
products*: matrix products and convolutions that the built engine computes in float32, by the types of the strongly
typed network that TensorRT's parser made and by its list of built layers. Random weights are harder to quantize than
trained ones, and their error says nothing about a trained model's; MiniLM's is that of all token states, padding
included, by the default recipe ([what recipes cost](accuracy.md)).
"""

CONVERTERS = """
## Other converters

The same networks by [modelopt's AutoCast](https://github.com/NVIDIA/Model-Optimizer), with calibration data, and by
the `float16` converters of ONNX Runtime (`onnxruntime.transformers`) and onnxconverter-common, inputs and outputs
kept in float32. Errors in percent.
"""

WHY = """
What each gets wrong here, and why the build keeps its own:

- **AutoCast** is the nearest: BF16 and FP16, calibrated ranges, and in most rows the same error as ours. It computes
  the angles of positions in 16 bits (DiT: four times Torch's error, which takes timesteps in float32), and the
  variance of norms that an exporter wrote out, where the ranges let it. It calls different unknown sizes `unk`, on
  which ONNX Runtime fails for some batch sizes. Its package wants onnx 1.21, onnxruntime-gpu 1.22 or 1.24 and cupy.
- **ONNX Runtime's** knows FP16 alone and no ranges. It appends the Casts of inputs behind the nodes that read them: a
  graph that ONNX forbids, build-engine refuses, and ONNX Runtime sorts. `large` is off by a hundred times as much.
- **onnxconverter-common's** knows FP16 alone and no ranges, and leaves a `Cast` to float32 in the model as it is, so
  that types do not fit behind it: any norm or position in float32, as T5, Llama and DiT have. `large` is off by three
  hundred times as much.
- None of the three quantizes from the float32 weights: a converted model holds 16-bit ones, and NVFP4 would round
  twice.
"""

COLUMNS = (
    *("ours, BF16", "AutoCast, BF16", "ours, FP16", "AutoCast, FP16"),
    *("ONNX Runtime, FP16", "onnxconverter-common, FP16"),
)
FAILURES = {
    "not in topological order": "order",
    "Type Error": "types",
    "re-use buffer": "sizes",
    "OutputMLValue": "sizes",
}
LEGEND = """*types*: ONNX Runtime refuses the types of a node. *order*: nodes stand behind those that read them, and
build-engine refuses the graph; ONNX Runtime sorts it, and gives the error beside. *sizes*: ONNX Runtime fails on
different sizes of one name."""


def percent(value: float) -> str:
    """With as many digits as tell rows apart."""
    return f"{100 * value:.2f}"


def networks(record: dict[str, Any]) -> Iterator[str]:
    """A row for each network and exporter."""
    columns = ("Torch BF16, %", "ours, %", "with NVFP4, %", "MLPs served by", "stays float32", "float32 products")
    yield f"| network | exporter | {' | '.join(columns)} |"
    yield "|---" * (2 + len(columns)) + "|"
    for key, found in record["networks"].items():
        name, exporter = key.split(", ")
        nvfp4 = found["nvfp4"]
        kernels = ", ".join(f"{count} by {text.partition(':')[0]}" for text, count in nvfp4["kernels"].items())
        network = nvfp4["network"]
        stays = sum(map(len, network["float32"].values()))
        products = ", ".join(network["float32_products"]) or "none"
        errors = (found["Torch, BF16"], found["converters"]["ours, BF16"]["error"], nvfp4["error"])
        cells = " | ".join(map(percent, errors))
        yield f"| {name} | {exporter} | {cells} | {kernels} | {f'{stays} nodes' if stays else '-'} | {products} |"


def reasons(record: dict[str, Any]) -> Iterator[str]:
    """What stays float32, over all networks."""
    found: dict[str, set[str]] = {}
    for key, entry in record["networks"].items():
        for reason in entry["nvfp4"]["network"]["float32"]:
            found.setdefault(reason, set()).add(key.partition(",")[0])
    for reason, names in sorted(found.items()):
        yield f"- {reason}: {', '.join(sorted(names))}"


def converters(record: dict[str, Any]) -> Iterator[str]:
    """A row for each network and exporter, a column for each converter."""
    yield f"| network | exporter | {' | '.join(COLUMNS)} |"
    yield "|---" * (2 + len(COLUMNS)) + "|"
    for key, found in record["networks"].items():
        cells = " | ".join(cell(found["converters"][name]) for name in COLUMNS)
        yield f"| {key.replace(', ', ' | ')} | {cells} |"


def cell(row: dict[str, Any]) -> str:
    """The error, what failed, or both."""
    error = row.get("error")
    failed = row.get("failed") or row.get("engine", {}).get("failed", "")
    words = [word for sign, word in FAILURES.items() if sign in failed][:1]
    if failed and not words:
        raise ValueError(f"no word for the failure {failed!r}")
    return " ".join([*([] if error is None else [percent(error)]), *(f"*{word}*" for word in words)])


def seconds(record: dict[str, Any]) -> str:
    """Of the largest model."""
    rows = record["networks"]["minilm, dynamo"]["converters"]
    listed = "; ".join(f"{name}: {rows[name]['seconds']:.1f}" for name in COLUMNS)
    return textwrap.fill(f"Seconds of one core for MiniLM (91 MB): {listed}.", 118)


def page() -> str:
    """The page's text."""
    record = load("mixed_precision")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    parts = [
        INTRODUCTION,
        *networks(record),
        "",
        "What stays float32, and in which networks:",
        "",
        *reasons(record),
        CONVERTERS,
        *converters(record),
        "",
        LEGEND,
        "",
        seconds(record),
        WHY,
        textwrap.fill(f"Versions: {versions}.", 118),
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """The command line."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
