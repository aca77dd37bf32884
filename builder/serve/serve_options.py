"""The options of a server, each written once (see `builder.options`)."""

# Without `from __future__ import annotations`: the types of fields are read.

from pathlib import Path
from typing import ClassVar, Literal

import attrs
from attrs import field

from trt_nvfp4.builder.options import Options, described, path

WHAT = "What to serve"
WHERE = "Where to listen"
LIMITS = "Limits"


@attrs.frozen
class ServeOptions(Options):
    """A model and how to serve it: the options of `trt-nvfp4 serve`, which its `--help` explains.

    Raises UsageError for a value that an option does not take.
    """

    GROUPS: ClassVar[tuple[str, ...]] = (WHAT, WHERE, LIMITS)

    model: Path = field(
        converter=Path,
        metadata=described(
            "OUT.engine of build-engine, a bundle folder, the parts of a model that takes images, the ranks of a model "
            "that is split over GPUs, an exported or rewritten ONNX model, or a Hugging Face directory."
        ),
    )
    tokenizer: Path | None = field(
        default=None,
        converter=path,
        kw_only=True,
        metadata=described(
            "Folder with the tokenizer's files (default: the one beside the model).", WHAT, metavar="DIR"
        ),
    )
    name: str | None = field(
        default=None,
        kw_only=True,
        metadata=described("The model's name in the API (default: that of its file or folder).", WHAT, metavar="NAME"),
    )
    runner: Literal["auto", "tensorrt", "onnxruntime", "torch"] = field(
        default="auto", kw_only=True, metadata=described("What runs the model, as for generate.", WHAT)
    )
    draft: str | None = field(
        default=None,
        kw_only=True,
        metadata=described(
            "What drafts tokens while few requests run, as for generate; the text stays the same. Default: the drafter "
            "beside the model, else ngram.",
            WHAT,
            metavar="ngram|none|MODEL",
        ),
    )
    host: str = field(
        default="127.0.0.1",
        kw_only=True,
        metadata=described("Address to listen at; 0.0.0.0 for all of the machine's.", WHERE, metavar="ADDRESS"),
    )
    port: int = field(
        default=8000,
        kw_only=True,
        metadata=described("Port; 0 takes a free one.", WHERE, metavar="N", at_least=0, at_most=65535),
    )
    api_key_file: Path | None = field(
        default=None,
        converter=path,
        kw_only=True,
        metadata=described(
            "File with API keys, one a line; requests need one of them (default: everybody may ask).",
            WHERE,
            metavar="FILE",
        ),
    )
    slots: int | None = field(
        default=None,
        kw_only=True,
        metadata=described(
            "Requests that run at once, each with a row of the caches; at most the model's --max-batch (default: that, "
            "and no more than 8).",
            LIMITS,
            metavar="N",
            at_least=1,
            at_most=1024,
        ),
    )
    max_queue: int = field(
        default=256,
        kw_only=True,
        metadata=described("Requests that may wait for a slot; more get status 429.", LIMITS, metavar="N", at_least=1),
    )
    max_per_client: int = field(
        default=128,
        kw_only=True,
        metadata=described("Requests of one API key, or address, at a time.", LIMITS, metavar="N", at_least=1),
    )
    max_seconds: float = field(
        default=600.0,
        kw_only=True,
        metadata=described(
            "Seconds that a request may take; the header X-Request-Timeout asks for fewer.",
            LIMITS,
            metavar="N",
            at_least=1,
        ),
    )
    drain_seconds: int = field(
        default=60,
        kw_only=True,
        metadata=described(
            "Seconds for running requests to end after SIGTERM, which ends the server.", LIMITS, metavar="N", at_least=0
        ),
    )
