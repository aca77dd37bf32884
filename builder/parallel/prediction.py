"""Whether several GPUs are faster than one: the least time of a rank's products and of the sums between the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from trt_nvfp4.builder.parallel.shard import Rank
from trt_nvfp4.builder.records.contents import Prediction
from trt_nvfp4.common.collectives import is_collective
from trt_nvfp4.graph_passes.planning.kinds.products import experts_touched

#: Microseconds of a sum of few values over two H200, by NCCL in a CUDA graph:
#: `benchmarks/results/models/parallel.json`.
SUM_US = 10.0
_SIXTEEN_BITS = 2
#: Draws of experts; so many choices of each expert, on average, that all are chosen.
_DRAWS, _ALL = 200, 16


@dataclass(frozen=True)
class Link:
    """The link between GPUs of one machine: bytes per second in one direction, as the maker states them."""

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
    GPU that has the whole model. `evenly`: it takes tokens to choose experts, which are spread, evenly at random."""

    ranks: int
    link: str
    tokens: int
    products_us: float
    sums: int
    sums_us: float
    one_gpu_us: float
    speed_up: float
    evenly: bool = False


def predict(
    target: str, rank: Rank, products: Sequence[Prediction], file: Path, top_k: int | None = None
) -> RanksPrediction | None:
    """The prediction for a step at the opt shapes. `products`: those of `rank`, by `roofline.predict`; `file`: its ONNX
    file; `top_k`: experts per token, where experts are spread over ranks. None without predicted products, without
    `top_k` where it is needed, and where a width of the tensors that ranks add up is unknown.

    One GPU reads what all ranks read, so its products take as many times as long. If whole experts are spread, it reads
    those that its tokens choose, evenly at random, and the step waits for the rank with most of them.
    """
    spreads = rank.spread > 1 and any("experts" in entry["shapes"] for entry in products)
    if not products or (spreads and top_k is None):
        return None
    widths = summed_widths(file)
    if None in widths:
        return None
    ranks = rank.count
    link = LINKS.get(target, PCIE_5)
    rows = max(entry["tokens"] for entry in products)
    of_rank = one_gpu = 0.0
    for entry in products:
        us = entry["predicted_us"]["nvfp4"]
        slowest, unsplit = 1.0, float(ranks)
        if spreads and "experts" in entry["shapes"]:
            assert top_k is not None
            slowest, unsplit = _of_spread_experts(entry, rank, top_k)
        of_rank += slowest * us
        one_gpu += unsplit * us
    sums = [sum_us(rows * width, ranks, link) for width in widths if width is not None]
    return RanksPrediction(
        ranks=ranks,
        link=link.name,
        tokens=rows,
        products_us=of_rank,
        sums=len(sums),
        sums_us=sum(sums),
        one_gpu_us=one_gpu,
        speed_up=one_gpu / (of_rank + sum(sums)),
        evenly=spreads,
    )


def _of_spread_experts(entry: Prediction, rank: Rank, top_k: int) -> tuple[float, float]:
    """Times of the slowest rank and of one GPU, as multiples of the roofline's for a rank's mixture. The roofline lets
    each token choose among only the rank's experts; a shared expert is split like any MLP."""
    shapes, tokens = entry["shapes"], entry["tokens"]
    own = shapes["experts"]
    counted = experts_touched(own, shapes["top_k"], tokens)
    routed = counted * shapes["intermediate_features"]
    routed /= routed + shapes.get("shared_features", 0)
    slowest = most_chosen(own * rank.spread, top_k, tokens, rank.spread)
    whole = experts_touched(own * rank.spread, top_k, tokens) * rank.count / rank.spread
    return routed * slowest / counted + (1 - routed), routed * whole / counted + (1 - routed) * rank.count


def most_chosen(experts: int, top_k: int, tokens: int, shares: int) -> float:
    """The average number of chosen experts in the share with most of them, where each of `tokens` chooses `top_k` of
    `experts` evenly at random. Estimated from draws with a fixed seed."""
    if tokens * top_k > _ALL * experts:
        return experts / shares
    rng = np.random.default_rng(0)
    found = []
    for _ in range(_DRAWS):
        order = rng.random((tokens, experts)).argpartition(top_k - 1, axis=1)[:, :top_k]
        chosen = np.zeros(experts, bool)
        chosen[order.ravel()] = True
        found.append(int(chosen.reshape(shares, -1).sum(1).max()))
    return float(np.mean(found))


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
    evenly = ", each token's experts chosen evenly at random" if prediction.evenly else ""
    return (
        f"least time of {prediction.tokens} tokens at once{evenly}: {prediction.products_us:.0f} us of a rank's "
        f"products and {prediction.sums_us:.0f} us of {prediction.sums} sums over {prediction.link}, against "
        f"{prediction.one_gpu_us:.0f} us: {ranks} GPUs are {verdict}"
    )
