"""Whether several GPUs are faster than one: the least time of a rank's products and of the sums between the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from trt_nvfp4.builder.parallel.shard import Rank
from trt_nvfp4.builder.report.contents import Prediction
from trt_nvfp4.common.collectives import is_collective

#: Of a sum of few values over two H200, by NCCL in a CUDA graph, as measured (`parallel.json` among the records).
SUM_US = 10.0
_SIXTEEN_BITS = 2


@dataclass(frozen=True)
class Link:
    """What GPUs of one machine are joined by: bytes per second in one direction, as the maker states them."""

    name: str
    bandwidth: float


NVLINK_4, NVLINK_5 = Link("NVLink", 450e9), Link("NVLink", 900e9)
PCIE_5 = Link("PCIe 5.0 x16", 64e9)
LINKS = {"b200": NVLINK_5, "b300": NVLINK_5, "h200": NVLINK_4, "h100": NVLINK_4}


def sum_us(values: int, ranks: int, link: Link) -> float:
    """Least microseconds of a sum of so many 16-bit values over `ranks`, in a ring: each sends 2 (ranks - 1) / ranks of
    them."""
    return SUM_US + 2 * (ranks - 1) / ranks * values * _SIXTEEN_BITS / link.bandwidth * 1e6


@dataclass(frozen=True)
class RanksPrediction:
    """The least microseconds of a step of `tokens` rows: of a rank's products, of the `sums` between ranks, and of one
    GPU that has the whole model."""

    ranks: int
    link: str
    tokens: int
    products_us: float
    sums: int
    sums_us: float
    one_gpu_us: float
    speed_up: float


def predict(target: str, rank: Rank, products: Sequence[Prediction], file: Path) -> RanksPrediction | None:
    """Of a step as the engines are tuned for: `products` are those of `rank`, as `roofline.predict` has them, `file` is
    its ONNX file. None where nothing is predicted of the products, where experts are spread over ranks, and where a
    width of the tensors that ranks add up is unknown.

    One GPU reads what all ranks do, so it is taken to need as many times as long for the products. That does not hold
    of whole experts: the prediction of a rank then counts each token's experts as its own, as if no other had them.
    """
    if not products or rank.spread > 1:
        return None
    widths = summed_widths(file)
    if None in widths:
        return None
    ranks = rank.count
    link = LINKS.get(target, PCIE_5)
    rows = max(entry["tokens"] for entry in products)
    of_rank = sum(entry["predicted_us"]["nvfp4"] for entry in products)
    sums = [sum_us(rows * width, ranks, link) for width in widths if width is not None]
    return RanksPrediction(
        ranks=ranks,
        link=link.name,
        tokens=rows,
        products_us=of_rank,
        sums=len(sums),
        sums_us=sum(sums),
        one_gpu_us=ranks * of_rank,
        speed_up=ranks * of_rank / (of_rank + sum(sums)),
    )


def summed_widths(rank: Path) -> list[int | None]:
    """The last dimension of every tensor that ranks add up; None where the file does not say it."""
    graph = onnx.load(rank, load_external_data=False).graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.output)}
    dims = [shapes.get(node.output[0]) for node in graph.node if is_collective(node)]
    return [(found[-1].dim_value or None) if found else None for found in dims]


def shown(prediction: RanksPrediction) -> str:
    """One line for the summary."""
    ranks, speed_up = prediction.ranks, prediction.speed_up
    verdict = f"{speed_up:.2f} times as fast as one" if speed_up > 1 else f"slower than one ({speed_up:.2f} times)"
    return (
        f"least time of {prediction.tokens} tokens at once: {prediction.products_us:.0f} us of a rank's products "
        f"and {prediction.sums_us:.0f} us of {prediction.sums} sums over {prediction.link}, against "
        f"{prediction.one_gpu_us:.0f} us: {ranks} GPUs are {verdict}"
    )
