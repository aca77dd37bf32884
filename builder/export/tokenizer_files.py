"""The files of a Hugging Face directory that turn text into a language model's tokens and back."""

import filecmp
import shutil
from pathlib import Path

from trt_nvfp4.builder.errors import ModelFaultError
from trt_nvfp4.builder.model.decoder_contract import TOKENIZER, own_tokenizer
from trt_nvfp4.common.external_data import inside
from trt_nvfp4.common.replacing import replacing

# config.json: transformers finds the tokenizer's class by it where tokenizer_config.json names none.
_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
_BESIDE = ("config.json", "generation_config.json")


def tokenizer_files(directory: Path) -> list[Path]:
    """The tokenizer's files in the directory, its chat template included; none where there is no tokenizer."""
    return [file for name in _NAMES if (file := directory / name).is_file()]


def copy_beside(directory: Path, file: Path) -> Path | None:
    """As `copy_tokenizer`, to where `tokenizer_beside(file)` finds it: `tokenizer/`, or a folder of the file's own
    where that one holds another tokenizer, which other engines there use."""
    shared, own = file.with_name(TOKENIZER), own_tokenizer(file)
    there, given = ([path.name for path in _files(folder)] for folder in (shared, directory))
    is_other = there and (there != given or filecmp.cmpfiles(directory, shared, given, shallow=False)[0] != given)
    return copy_tokenizer(directory, own if is_other or own.is_dir() else shared)


def _files(directory: Path) -> list[Path]:
    """The tokenizer's files and the configurations that belong to them; none where there is no tokenizer."""
    files = tokenizer_files(directory)
    return files and files + [file for name in _BESIDE if (file := directory / name).is_file()]


def copy_tokenizer(directory: Path, destination: Path) -> Path | None:
    """Copy the tokenizer's files, and the configurations that belong to them, into the folder `destination`, in place
    of those of another; None where the directory has no tokenizer. Raises ModelFaultError for links that leave the
    directory."""
    files = _files(directory)
    if not files:
        return None
    try:
        for file in files:
            inside(directory, file.name)
    except ValueError as error:
        raise ModelFaultError(str(error)) from error
    destination.mkdir(parents=True, exist_ok=True)
    for file in _files(destination):
        if not (directory / file.name).is_file():
            file.unlink()
    for file in files:
        with replacing(destination / file.name) as temporary:
            shutil.copyfile(file, temporary)
    return destination
