"""Draws `docs/images/architecture.svg` from the import contracts in `pyproject.toml`.

usage: python docs/hooks/architecture_picture.py
"""

import textwrap
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
PURPOSES = {
    "builder": "from a request to a checked engine; each room imports only those behind it",
    "graph_passes": "ONNX in, ONNX out; each room imports only those behind it",
    "calibration": "what is measured on samples, how weights are rounded",
    "common": "files, ONNX Runtime sessions, number formats, metrics",
    "plugins": "ops and the CUDA kernels that compute them",
}
#: Rooms of packages without a contract of their own.
ROOMS = {"calibration": ["statistics, recipes, samples"], "plugins": ["ops, adapters, kernels, compile"]}
FLOW = (
    "model.onnx or Hugging Face directory",
    "export, load: a checked, normalized graph",
    "patterns: subgraphs",
    "planning: OUT.plan.yaml",
    "statistics: OUT.statistics.json",
    "weights, lowerings, rewrite: OUT.rewritten.onnx",
    "tensorrt: OUT.engine, verified",
    "report: OUT.report.json, .html",
)
_STYLE = """<style>
.box { fill: #f3f5f9; stroke: #7a869a; } .data { fill: #eaf4e4; stroke: #3f7d20; } .arrow { fill: none; stroke: #44546a; stroke-width: 2; }
text { fill: #1c2430; } .name { font-weight: 600; font-size: 18px; } .what { fill: #5b6675; } .part { font-family: monospace; font-size: 15px; } .mid { text-anchor: middle; }
</style>"""  # noqa: E501
_COLUMNS = 64  # characters of a line of rooms


def contracts() -> list[dict[str, Any]]:
    """The layers contracts: of the packages, then those of the rooms in one package each."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    return [contract for contract in settings["contracts"] if contract["type"] == "layers"]


def rooms_by_package() -> dict[str, list[str]]:
    """Layers by package, the highest first, as their contracts list them ("a | b": rooms side by side)."""
    return {
        contract["containers"][0].rpartition(".")[2]: contract["layers"]
        for contract in contracts()
        if "containers" in contract
    }


def picture() -> str:
    """The drawing, as SVG."""
    packages = [name.rpartition(".")[2] for name in contracts()[0]["layers"]]
    layers = rooms_by_package()
    shapes, top = [], 10
    for package in packages:
        listed = ", ".join(layers.get(package, []))
        rooms = textwrap.wrap(listed, _COLUMNS) or ROOMS.get(package, [])
        height = 50 + 20 * len(rooms)
        if shapes:
            shapes.append(f'<path d="M 320 {top - 24} v 20 m -6 -8 l 6 8 l 6 -8" class="arrow"/>')
        shapes.append(f'<rect x="10" y="{top}" width="620" height="{height}" rx="6" class="box"/>')
        shapes.append(f'<text x="24" y="{top + 24}" class="name">{package}</text>')
        shapes.append(f'<text x="24" y="{top + 43}" class="what">{PURPOSES[package]}</text>')
        shapes += [
            f'<text x="24" y="{top + 63 + 20 * line}" class="part">{text}</text>' for line, text in enumerate(rooms)
        ]
        top += height + 24
    shapes.append(f'<text x="24" y="{top + 10}" class="name">Data flow</text>')
    top += 24
    for step, text in enumerate(FLOW):
        if step:
            shapes.append(f'<path d="M 320 {top - 12} v 10 m -5 -6 l 5 6 l 5 -6" class="arrow"/>')
        shapes.append(
            f'<rect x="10" y="{top}" width="620" height="30" rx="15" class="data"/>'
            f'<text x="320" y="{top + 20}" class="mid">{text}</text>'
        )
        top += 42
    frame = f'viewBox="0 0 640 {top}" font-family="system-ui, sans-serif" font-size="16"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>',
        _STYLE,
        f'<rect width="640" height="{top}" fill="#fff"/>',
    ]
    return "\n".join([*lines, *shapes, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
