"""The drafter that a user names. Bundles carry this module."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from trt_nvfp4.common.json_text import read_json

from ...errors import ModelFaultError, UsageError
from ...model.model_files import ENGINES, is_eagle
from ...records.bundle import DRAFT, MANIFEST, named_file
from .drafter import Drafter
from .model import ModelDrafter
from .ngram import NgramDrafter
from .same_tokenizer import check_same_tokenizer

if TYPE_CHECKING:
    from ..open import RunnerName
    from ..runner import Runner

#: Drafters without a model, by name; anything else is the path of one.
NONE, NGRAM = "none", "ngram"
_REWRITTEN = ".rewritten.onnx"


def drafter_beside(model: Path) -> Path | None:
    """The drafter that was built with `model`, a bundle or a file (also an engine in its bundle); None without one.
    Raises ModelFaultError for a broken bundle."""
    bundled = (model if model.is_dir() else model.parent) / DRAFT
    if model.is_dir():
        return bundled if (bundled / MANIFEST).is_file() else None
    suffix = _REWRITTEN if model.name.endswith(_REWRITTEN) else model.suffix
    kind = ENGINES[0] if suffix in ENGINES else suffix
    beside = model.with_name(f"{model.name.removesuffix(suffix)}.draft{kind}")
    if not beside.is_file() and (bundled / MANIFEST).is_file():
        try:
            beside = named_file(bundled, read_json(bundled / MANIFEST)["engine"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFaultError(f"{bundled / MANIFEST}: not a manifest of trt-nvfp4 ({error!r})") from error
    return beside if beside.is_file() else None


def check_draft(draft: str | Path | None) -> None:
    """Raise UsageError for a drafter that is not there, or not built yet, before a model is opened."""
    if draft is None or str(draft) in (NONE, NGRAM):
        return
    if not Path(draft).exists():
        raise UsageError(f"--draft {draft}: no such file or folder; give {NGRAM}, {NONE}, a head or a small model")
    if is_eagle(Path(draft)):
        raise UsageError(
            f"--draft {draft}: an EAGLE-3 head is built with its model (build-engine MODEL --draft {draft}); then it "
            "is found beside the engine"
        )


def open_drafter(
    draft: str | Path | None, path: Path, tokenizer: Path, model: Runner, made: ExitStack, runner: RunnerName
) -> Drafter | None:
    """The drafter for `model`, which was opened from `path`: None for "none", prompt lookup for "ngram", else the head
    or small language model at a path, on the same kind of `runner`. `draft` None: what lies beside the model, else
    prompt lookup, where the model can verify drafts. `tokenizer`: the folder of the model's. `made` closes it.

    Raises BuilderError: usage for a model that does not fit; as `open_runner` does for a file that cannot be run.
    """
    if draft is None:
        draft = drafter_beside(path) or NGRAM if model.decoder.verified_tokens > 1 else NONE
    if str(draft) == NONE:
        return None
    if str(draft) == NGRAM:
        return NgramDrafter()
    from ..open import opened, tokenizer_folder

    small, _ = opened(Path(draft), made, runner=runner)
    if not small.decoder.takes_hidden:
        check_same_tokenizer(f"--draft {draft}", tokenizer, tokenizer_folder(Path(draft)))
    return ModelDrafter(small, model)
