"""The head that `--draft` names, for a loaded target."""

from pathlib import Path
from typing import Any

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.export.draft_heads.eagle import load_eagle, states_for_eagle
from trt_nvfp4.builder.export.draft_heads.head import Head, HiddenStates, last_hidden_states
from trt_nvfp4.builder.export.draft_heads.mtp import load_mtp
from trt_nvfp4.builder.model.decoder_contract import AUTO


def head_for(directory: Path, target: Any, draft: str) -> tuple[Head, HiddenStates]:
    """The head, and the hidden states of `target`, the model in `directory`, that it reads. `draft`: AUTO for the one
    in the model's own files, or the directory of an EAGLE-3 head. Raises BuilderError for a head that does not fit."""
    if target.get_output_embeddings() is None:
        raise UsageError(f"--draft {draft}: {directory}: {type(target).__name__} generates nothing; leave it out")
    if draft == AUTO:
        return load_mtp(directory, target), last_hidden_states(target)
    head = load_eagle(Path(draft), target)
    return head, states_for_eagle(target, head)
