"""A local Hugging Face model directory becomes ONNX, by torch.onnx's dynamo exporter.

transformers is imported when called alone: users of ONNX files need neither it nor onnxscript.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import MODEL_AT_FAULT, UNAVAILABLE, BuilderError
from .origin import EXPORTED
from .real_arithmetic import real_arithmetic

if TYPE_CHECKING:
    import torch

OPSET = 21
# Above this many bytes of weights they go to a file beside the ONNX (a protobuf ends at 2 GiB).
EXTERNAL_DATA_BYTES = 256 << 20


def is_model_directory(path: Path) -> bool:
    return path.is_dir() and (path / "config.json").is_file()


def longest_sequence(directory: Path) -> int | None:
    """The position limit that a Hugging Face directory states; None for anything else."""
    if not is_model_directory(directory):
        return None
    limit = json.loads((directory / "config.json").read_text()).get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit > 0 else None


def export(directory: Path, destination: Path) -> Path:
    """Export the model of a Hugging Face directory to `destination` (ONNX, weights beside it when they are large).

    Text models take input_ids and attention_mask (int64 [batch, sequence], both dynamic), image models pixel_values
    (float [batch, channels, height, width], batch dynamic). The one output is `logits` for a model with a head,
    `last_hidden_state` otherwise. Raises BuilderError.
    """
    if not is_model_directory(directory):
        raise BuilderError(MODEL_AT_FAULT, f"{directory}: not a Hugging Face model directory (it has no config.json)")
    try:
        import transformers
    except ImportError as error:
        raise BuilderError(
            UNAVAILABLE,
            f"exporting {directory} needs transformers and onnxscript: pip install 'trt-nvfp4[hf]' ({error})",
        ) from error
    import torch

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    _check_architecture(directory)
    with _quiet():
        try:
            model = _load(directory, transformers)
        except (OSError, ValueError, ImportError) as error:
            raise BuilderError(MODEL_AT_FAULT, f"{directory}: transformers cannot load this model: {error}") from error
        wrapper, inputs, dynamic, output = _plain(model)
        destination.parent.mkdir(parents=True, exist_ok=True)
        with torch.no_grad(), real_arithmetic():
            try:
                program = torch.onnx.export(
                    wrapper,
                    tuple(inputs.values()),
                    dynamo=True,
                    opset_version=OPSET,
                    input_names=list(inputs),
                    output_names=[output],
                    dynamic_shapes=dynamic,
                    verbose=False,
                )
            except Exception as error:
                # The exporter raises types of its own for whatever it cannot translate.
                raise BuilderError(
                    MODEL_AT_FAULT,
                    f"{directory}: torch.onnx cannot export {type(model).__name__}: {_first_line(error)}",
                ) from error
        assert program is not None
        program.model.metadata_props[EXPORTED] = directory.name
        size = sum(tensor.nbytes for tensor in wrapper.state_dict().values())
        # The weights' file is named inside the ONNX file, so both are written under their final names, elsewhere.
        with tempfile.TemporaryDirectory(prefix=".export-", dir=destination.parent) as folder:
            program.save(str(Path(folder) / destination.name), external_data=size > EXTERNAL_DATA_BYTES)
            for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == destination.name):
                os.replace(file, destination.parent / file.name)
    return destination


def _check_architecture(directory: Path) -> None:
    try:
        config = json.loads((directory / "config.json").read_text())
    except ValueError as error:
        raise BuilderError(MODEL_AT_FAULT, f"{directory / 'config.json'}: not JSON ({error})") from error
    if "model_type" not in config:
        raise BuilderError(MODEL_AT_FAULT, f"{directory / 'config.json'}: no model_type, so not a transformers model")


def _load(directory: Path, transformers: Any) -> torch.nn.Module:
    """The class named in the configuration, else the bare model."""
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or []]
    loader = next((cls for cls in named if cls is not None), transformers.AutoModel)
    model: Any = loader.from_pretrained(directory, config=config, dtype="auto", local_files_only=True)
    if hasattr(model, "set_experts_implementation"):
        # Grouped matrix products, the default, have no ONNX operator, and loops over the experts depend on the data.
        model.set_experts_implementation("batched_mm")
    loaded: torch.nn.Module = model.eval()
    return loaded


def _plain(model: Any) -> tuple[torch.nn.Module, dict[str, torch.Tensor], tuple[dict[int, Any], ...], str]:
    """A module from tensors to one tensor, example inputs, dynamic shapes, and the output's name."""
    import torch

    is_image = model.main_input_name == "pixel_values"
    output = (
        "logits" if hasattr(model, "lm_head") or type(model).__name__.split("For")[-1] != type(model).__name__ else ""
    )
    output = output or "last_hidden_state"

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            if is_image:
                result = self.model(pixel_values=tensors[0])
            else:
                extra = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
                result = self.model(input_ids=tensors[0], attention_mask=tensors[1], **extra)
            # Heads other than logits (masked language models, classifiers, ...) still come first.
            tensor: torch.Tensor = result[output] if output in result else result[0]
            return tensor

    if is_image:
        config = model.config
        size = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
        pixels = torch.rand(2, getattr(config, "num_channels", 3), *size, dtype=next(model.parameters()).dtype)
        return Plain().eval(), {"pixel_values": pixels}, (({0: torch.export.Dim("batch")},),), output  # type: ignore[return-value]
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence")
    ids = torch.randint(0, model.config.vocab_size, (2, 16))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Plain().eval(), inputs, (({0: batch, 1: sequence},) * 2,), output  # type: ignore[return-value]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's notes about itself from the terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
