"""The inputs of a Hugging Face directory's export by its configuration, before any weight is read."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trt_nvfp4.builder.errors import BuilderError
from trt_nvfp4.builder.export.checkpoints.stated_size import bounded_modules
from trt_nvfp4.builder.export.fixed_sizes import UNFIXED, FixedSizes
from trt_nvfp4.builder.export.huggingface import TEXT, has_caches, longest_sequence, quiet
from trt_nvfp4.builder.export.loading import class_of
from trt_nvfp4.builder.export.plain import IDS, MASK, check_kind, input_shapes
from trt_nvfp4.builder.model.decoder_contract import NEW_LENGTH, PAST_LENGTH, CacheOptions
from trt_nvfp4.builder.model.model_files import check_config
from trt_nvfp4.calibration.samples.samples import InputSpec

_INTEGERS = np.dtype(np.int64)
# bfloat16 inputs take float32 samples.
_FLOATS = {"torch.float16": np.float16, "torch.bfloat16": np.float32, "torch.float32": np.float32}
_TEXT = InputSpec(("batch", "sequence"), _INTEGERS)


@dataclass(frozen=True)
class ExpectedInputs:
    """`specs` has the inputs but for a decoder's caches; `longest` is the longest sequence, None where none is stated;
    `complete`: there are no caches, and all types are known."""

    specs: dict[str, InputSpec]
    longest: int | None
    complete: bool


def expected_inputs(
    directory: Path, task: str, cache: CacheOptions, fixed: FixedSizes = UNFIXED
) -> ExpectedInputs | None:
    """None where the model's class cannot be made without its weights, or is the directory's own.

    Raises BuilderError as the export does, for kinds of models that are not exported and capacities beyond the model's.
    """
    import torch
    import transformers

    check_config(directory)
    with quiet(), bounded_modules(directory):
        try:
            config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            with torch.device("meta"):
                model = class_of(config, transformers)(config)
        except BuilderError:
            raise
        except Exception:  # of any kind: loading, which comes next, says what is wrong
            return None
        if task != TEXT:
            check_kind(directory, model, fixed)
        longest = longest_sequence(directory)
    if has_caches(task, model):
        capacity = cache.checked_capacity(directory, longest)
        length = InputSpec(("batch",), _INTEGERS)
        return ExpectedInputs({IDS: _TEXT, PAST_LENGTH: length, NEW_LENGTH: length}, capacity, complete=False)
    floats = np.dtype(_FLOATS.get(str(config.dtype), np.float32))
    specs = {
        name: InputSpec(shape, _INTEGERS if name in (IDS, MASK) else floats)
        for name, shape in input_shapes(model, fixed).items()
    }
    is_text = IDS in specs
    return ExpectedInputs(specs, longest if is_text else None, complete=is_text or str(config.dtype) in _FLOATS)
