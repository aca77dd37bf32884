"""Quantizes the subjects' weights and activations, in Torch, as the rewrite and the kernels do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.subjects import Site, Subject
from trt_nvfp4.calibration.recipes import InputStatistics, Recipe, channel_scales, quantize_weight
from trt_nvfp4.calibration.recipes.residual_channels import combined_mean_square, residual_order
from trt_nvfp4.common import nvfp4
from trt_nvfp4.plugins.ops import number_formats


def fold(subject: Subject, recipe: Recipe, statistics: dict[str, InputStatistics]) -> dict[str, InputStatistics]:
    """Folds AWQ's channel scales into the model, where the recipe has them; returns the statistics after it."""
    folded = dict(statistics)
    for place in subject.folds if recipe.awq else ():
        readers = [(site.weight, statistics[site.name]) for site in place.sites]
        scales = channel_scales(readers, recipe)
        for part in place.divided:
            part.div_(scales if part.dim() == 1 else scales[:, None])
        for router in place.routers:
            router.mul_(scales)
        for site in place.sites:
            site.set_weight(site.weight * scales)
            folded[site.name] = statistics[site.name].divided(scales)
    return folded


def input_statistics(subject: Subject, kinds: frozenset[str]) -> dict[str, InputStatistics]:
    """The statistics of every site's input over the calibration text, by site name; `amax` is among them."""
    kinds |= {"amax"}
    rows: dict[str, int] = {}
    found: dict[str, dict[str, Any]] = {}
    latest: list[Any] = [None, None]  # query, key and value are given the same tensor

    def add(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if latest[0] is not inputs[0]:
                latest[:] = inputs[0], InputStatistics.of_rows(inputs[0], kinds)
            count = inputs[0].numel() // inputs[0].shape[-1]
            before = rows.get(name, 0)
            rows[name] = before + count
            known = found.setdefault(name, {})
            for kind in kinds:
                new = getattr(latest[1], kind)
                if kind not in known:
                    known[kind] = new
                elif kind == "amax":
                    known[kind] = max(known[kind], new)
                elif kind == "channel_amax":
                    known[kind] = torch.maximum(known[kind], new)
                else:
                    known[kind] = torch.lerp(known[kind], new, count / rows[name])

        return hook

    hooks = [site.linears[0].register_forward_pre_hook(add(site.name)) for site in subject.sites]
    subject.calibrate()
    for hook in hooks:
        hook.remove()
    return {name: InputStatistics(rows[name], **known) for name, known in found.items()}


def channel_orders(subject: Subject, statistics: dict[str, InputStatistics], residual: int) -> dict[str, Tensor | None]:
    """By site, the order of its input's channels that the rewrite gives residual channels; None: the model's own.
    Experts that read one activation share its order, those of down have their own; needs `mean_square`."""
    if not residual:
        return dict.fromkeys(site.name for site in subject.sites)

    def key(site: Site) -> str:
        return site.name if site.is_down else site.activation

    together: dict[str, list[InputStatistics]] = {}
    for site in subject.sites:
        together.setdefault(key(site), []).append(statistics[site.name])
    orders = {name: residual_order(combined_mean_square(read), residual) for name, read in together.items()}
    return {site.name: orders[key(site)] for site in subject.sites}


def quantize_weights(subject: Subject, recipe: Recipe, statistics: dict[str, InputStatistics]) -> None:
    """Every site's weight through NVFP4 by the recipe, in the order of channels of its residual channels."""
    orders = channel_orders(subject, statistics, recipe.residual)
    for site in subject.sites:
        order, known = orders[site.name], statistics[site.name]
        if order is None:
            site.set_weight(nvfp4.dequantize(*quantize_weight(site.weight, recipe, known)))
        else:
            quantized = quantize_weight(site.weight[:, order], recipe, known.in_order(order))
            site.set_weight(nvfp4.dequantize(*quantized)[:, order.argsort()])


@contextmanager
def quantized_activations(
    subject: Subject,
    statistics: dict[str, InputStatistics],
    scale_search: int = 0,
    residual: int = 0,
) -> Iterator[None]:
    """W4A4: the input of every site goes through NVFP4, by the kernels' arithmetic, under its calibrated scale.

    `residual`: so many heavy channels are followed by their quantization errors (see `channel_orders`).
    """
    amax: dict[str, float] = {}
    for site in subject.sites:
        amax[site.activation] = max(amax.get(site.activation, 0.0), statistics[site.name].amax or 0.0)
    orders = channel_orders(subject, statistics, residual)
    latest: list[Any] = [None, None, None]  # query, key and value are given the same tensor

    def quantize(site: Site) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        scale = number_formats.tensor_scale(torch.tensor(amax[site.activation]), scale_search)
        order = orders[site.name]

        def seen(x: Tensor) -> Tensor:
            ordered = x if order is None else x[..., order]
            codes, scales = number_formats.quantize_with_residual(ordered, scale.to(x.device), scale_search, residual)
            values = number_formats.dequantize_blocks(codes, scales, scale.to(x.device))
            if order is None:
                return values
            once = values[..., : len(order)].clone()
            once[..., -residual:] += values[..., len(order) :]
            return once[..., order.argsort()]

        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if latest[0] is not inputs[0] or latest[1] != site.activation:
                latest[:] = inputs[0], site.activation, seen(inputs[0])
            return (latest[2],)

        return hook

    hooks = [linear.register_forward_pre_hook(quantize(site)) for site in subject.sites for linear in site.linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
