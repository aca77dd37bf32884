"""Text from a decoder over its caches: an engine on its GPU, or the same model in ONNX Runtime."""

from .generator import Generation, Generator, Piece, Result, Timings

__all__ = ["Generation", "Generator", "Piece", "Result", "Timings"]
