"""Samples from plain text, tokenized by the tokenizer of a Hugging Face model directory."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trt_nvfp4.calibration.samples import chats
from trt_nvfp4.common.errors import CalibrationError
from trt_nvfp4.common.json_text import check_memory, check_ordinary
from trt_nvfp4.common.limited import LimitError
from trt_nvfp4.common.model_config import read_config
from trt_nvfp4.common.tokenizers import load_tokenizer, tokenized

# Suffixes of text files.
SUFFIXES = (".txt", ".jsonl")
_LONGEST = 512  # tokens of a sample, where the model does not allow fewer
# Characters that are tokenized in one process, with its limits; a longer paragraph has its own process.
_BATCH = 1_000_000
# The least share of the model's tokens that its tokenizer must know: vocabularies are padded, but not by as much.
_LEAST_KNOWN = 0.5
# The share of a text's tokens that may be unknown.
_MOST_UNKNOWN = 0.5


def tokenize(
    file: Path,
    directory: Path | None,
    inputs: Mapping[str, np.dtype],
    capacity: int | None = None,
    trust_remote_code: bool = False,
) -> list[dict[str, np.ndarray]]:
    """One sample [1, tokens] per paragraph (blank lines separate them; without any, per line) or, of a .jsonl file, per
    object: a chat ("messages" of role and content, through the tokenizer's chat template) or a "text". Longer ones come
    in pieces, none left out.

    `inputs` are the model's inputs and their types: those that tokenizers give (input_ids, attention_mask,
    token_type_ids), position_ids, and a decoder's past_length (0) and new_length. `capacity` is how many tokens a
    decoder's caches hold. A tokenizer's own Python code runs only with `trust_remote_code`.

    Raises CalibrationError: no text; no tokenizer in `directory`, or not the model's: one that knows few of its tokens,
    or hardly a word of the text; an input that text cannot give.
    """
    text, tokenizer, config = open_text(file, directory, trust_remote_code)
    is_jsonl = file.suffix == ".jsonl"
    paragraphs = chats.texts(file, text, tokenizer) if is_jsonl else [(part, False) for part in _paragraphs(text)]
    limit = config.get("max_position_embeddings")
    longest = min(_LONGEST, limit) if isinstance(limit, int) and limit > 0 else _LONGEST
    longest = min(longest, capacity or longest)
    samples = []
    for lists in _all_pieces(file, directory, tokenizer, paragraphs, longest):
        piece = {name: np.asarray(values) for name, values in lists.items()}
        tokens = len(piece["input_ids"])
        piece |= {"position_ids": np.arange(tokens), "past_length": np.array(0), "new_length": np.array(tokens)}
        if missing := sorted(set(inputs) - set(piece)):
            raise CalibrationError(f"{file}: text cannot give the model's input '{missing[0]}'; give arrays instead")
        samples.append({name: piece[name].astype(dtype)[None] for name, dtype in inputs.items()})
    largest = max((int(sample["input_ids"].max(initial=0)) for sample in samples if "input_ids" in sample), default=0)
    vocabulary = config.get("vocab_size")
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise CalibrationError(
            f"{directory}: the tokenizer gives token {largest}, the model knows {vocabulary}: it is another model's"
        )
    _check_known(file, directory, tokenizer, samples)
    return samples


def open_text(file: Path, directory: Path | None, trust_remote_code: bool = False) -> tuple[str, Any, dict[str, Any]]:
    """The text, the model's tokenizer and configuration: the part of `tokenize` that needs no model inputs.

    Raises CalibrationError: no text; no tokenizer in `directory`, or not the model's.
    """
    text = _read(file)
    tokenizer, config = _tokenizer(file, directory, trust_remote_code), _config(directory)
    _check_size(directory, tokenizer, config)
    return text, tokenizer, config


def _read(file: Path) -> str:
    try:
        check_memory(check_ordinary(file))
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{file}: not UTF-8 text: {error}") from error
    except ValueError as error:
        raise CalibrationError(f"{file}: not a text to read: {error}") from error
    if not text.strip():
        raise CalibrationError(f"{file}: holds no text")
    return text


def read_prompts(file: Path) -> list[str]:
    """The paragraphs of a text, or its lines where none is blank. Raises CalibrationError for another file than a
    text."""
    if file.suffix != ".txt" or not file.is_file():
        raise CalibrationError(f"{file}: no text file (.txt) with a prompt per line")
    return _paragraphs(_read(file))


def _paragraphs(text: str) -> list[str]:
    parts = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    return [line for line in text.splitlines() if line.strip()] if len(parts) == 1 else parts


def _check_size(directory: Path | None, tokenizer: Any, config: Mapping[str, Any]) -> None:
    vocabulary = config.get("vocab_size")
    if isinstance(vocabulary, int) and len(tokenizer) < _LEAST_KNOWN * vocabulary:
        raise CalibrationError(
            f"{directory}: its tokenizer knows {len(tokenizer)} tokens, and the model {vocabulary}: its files are "
            "incomplete, or another model's; download them again, or give arrays (.npz)"
        )


def _check_known(file: Path, directory: Path | None, tokenizer: Any, samples: list[dict[str, np.ndarray]]) -> None:
    """Raises CalibrationError where the tokenizer makes most of the text its one token for what it does not know."""
    unknown = tokenizer.unk_token_id
    parts = [sample["input_ids"].reshape(-1) for sample in samples if "input_ids" in sample]
    if unknown is None or not parts:
        return
    tokens = np.concatenate(parts)
    others = [token for token in tokenizer.all_special_ids if token != unknown]
    words = tokens[~np.isin(tokens, others)]
    if (share := float(np.mean(words == unknown)) if words.size else 0.0) > _MOST_UNKNOWN:
        raise CalibrationError(
            f"{file}: the tokenizer of {directory} does not know {share:.0%} of its tokens ({tokenizer.unk_token}): it "
            "is text of another kind than the model's, or the tokenizer's files are incomplete"
        )


def _all_pieces(
    file: Path, directory: Path | None, tokenizer: Any, paragraphs: Sequence[tuple[str, bool]], longest: int
) -> list[dict[str, list[int]]]:
    """The tokens of all paragraphs; each says whether it is a chat, whose template writes the special tokens itself."""
    found: list[dict[str, list[int]]] = []
    for batch in _batches(paragraphs):

        def pieces(batch: Sequence[tuple[str, bool]] = batch) -> list[dict[str, list[int]]]:
            return [piece for text, is_chat in batch for piece in _pieces(tokenizer, text, longest, not is_chat)]

        try:
            found += tokenized(pieces, sum(len(text) for text, _ in batch))
        except LimitError as error:
            raise CalibrationError(f"{file}: the tokenizer of {directory} fails: {error}") from error
    return found


def _batches(paragraphs: Sequence[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Neighbours, together of `_BATCH` characters at most."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text, is_chat in paragraphs:
        if batch and size + len(text) > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append((text, is_chat))
        size += len(text)
    if batch:
        yield batch


def _pieces(tokenizer: Any, paragraph: str, longest: int, add_special_tokens: bool) -> Iterator[dict[str, list[int]]]:
    """Whole pieces of a paragraph, special tokens included, of at most `longest` tokens: lists of numbers by name."""
    if tokenizer.is_fast:
        pieces = tokenizer(
            paragraph,
            truncation=True,
            max_length=longest,
            return_overflowing_tokens=True,
            add_special_tokens=add_special_tokens,
        )
        for i in range(len(pieces["input_ids"])):
            yield {name: list(pieces[name][i]) for name in pieces if name != "overflow_to_sample_mapping"}
        return
    # Tokenizers written in Python return the first piece only.
    tokens = tokenizer(paragraph, add_special_tokens=False)["input_ids"]
    step = longest - (tokenizer.num_special_tokens_to_add() if add_special_tokens else 0)
    for start in range(0, len(tokens), step):
        piece = tokenizer.prepare_for_model(tokens[start : start + step], add_special_tokens=add_special_tokens)
        yield {name: list(values) for name, values in piece.items()}


def _tokenizer(file: Path, directory: Path | None, trust_remote_code: bool) -> Any:
    if directory is None or not (directory / "tokenizer_config.json").exists():
        where = "no folder with one is known" if directory is None else f"{directory} has no tokenizer_config.json"
        what = "" if directory is None else "put the tokenizer's files there, or "
        raise CalibrationError(f"{file}: text needs the model's tokenizer, and {where}; {what}give arrays (.npz)")
    try:
        return load_tokenizer(directory, trust_remote_code)
    except ImportError as error:
        raise CalibrationError(f"{file}: text needs transformers: pip install transformers ({error})") from error
    except Exception as error:  # transformers raises many kinds for a broken tokenizer
        reason = (
            "it has Python code of its own, which runs only with --trust-remote-code; read it first, or give .npz"
            if "trust_remote_code" in str(error)
            else error
        )
        raise CalibrationError(f"{directory}: transformers cannot load its tokenizer: {reason}") from error


def _config(directory: Path | None) -> dict[str, Any]:
    file = None if directory is None else directory / "config.json"
    if file is None or not file.exists():
        return {}
    try:
        config = read_config(file.parent)
    except ValueError as error:
        raise CalibrationError(f"{file}: not JSON: {error}") from error
    return config if isinstance(config, dict) else {}
