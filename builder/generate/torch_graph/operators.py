"""All standard operators, which the modules of this folder register."""

from . import collectives, convolutions, elementwise, indexing, products, quantized, recurrences, reductions, shapes
from .registry import OPERATORS, Operator

__all__ = [
    "OPERATORS",
    "Operator",
    "collectives",
    "convolutions",
    "elementwise",
    "indexing",
    "products",
    "quantized",
    "recurrences",
    "reductions",
    "shapes",
]
