"""Compares the size that a configuration states with the directory's: transformers would build any size."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from trt_nvfp4.builder.errors import BuilderError, ModelFaultError
from trt_nvfp4.common.json_text import read_json

#: More modules than any model has: the largest mixtures, with modules for each expert, have 100,000.
MOST_MODULES = 250_000
# No format makes 32 bits out of one; what files need not hold, such as tables of positions, is below the rest.
_LARGEST_RATIO, _ALWAYS = 32, 1 << 30


@contextlib.contextmanager
def bounded_modules(directory: Path) -> Iterator[None]:
    """Raises ModelFaultError from what makes modules without an end."""
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise ModelFaultError(
                f"{directory / 'config.json'}: describes a network of more than {MOST_MODULES} modules, which no model "
                "has; correct its numbers of layers and experts, or download it again"
            )

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def check_size(directory: Path, model_class: Any, config: Any) -> None:
    """Raise ModelFaultError where the model that a configuration describes is too large to be the one whose
    weights the directory holds. A class that cannot be made without weights is not checked."""
    with bounded_modules(directory):
        try:
            with torch.device("meta"):
                model = model_class(config)
        except BuilderError:
            raise
        except Exception:  # of any kind: loading, which comes next, says what is wrong
            return
    tensors = (*model.parameters(), *model.buffers())
    stated = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    held = sum(file.stat().st_size for file in _files(directory) if file.is_file())
    if stated > _ALWAYS + _LARGEST_RATIO * held:
        raise ModelFaultError(
            f"{directory / 'config.json'}: describes a model of {stated / 1e9:.0f} GB, but the directory holds "
            f"{held / 1e9:.3f} GB; correct its sizes, or download the weights again"
        )


def _files(directory: Path) -> set[Path]:
    """The files beside config.json, and those that an index names, in other folders too. Raises ValueError, KeyError,
    TypeError or AttributeError for an invalid index."""
    indexes = [read_json(index) for index in directory.glob("*.index.json")]
    return {*directory.iterdir(), *(directory / name for index in indexes for name in index["weight_map"].values())}
