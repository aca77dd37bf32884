"""inspect-engine: what a plan, report, rewritten model, bundle or engine holds."""

# Without `from __future__ import annotations`: the types of options are read.

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import attrs
from attrs import field

from trt_nvfp4.builder.cli.command import Command
from trt_nvfp4.builder.cli.console import print_json
from trt_nvfp4.builder.model.model_files import check_exists, check_model_file
from trt_nvfp4.builder.options import Options, described
from trt_nvfp4.builder.terminal.output import output

WHAT = "What to print"


@attrs.frozen(kw_only=True)
class InspectOptions(Options):
    """The options of `inspect-engine`."""

    GROUPS: ClassVar[tuple[str, ...]] = (WHAT,)

    path: Path = field(
        converter=Path,
        metadata=described("A plan (.yaml), report (.json), ONNX file, engine, bundle, or folder of parts."),
    )
    why: str | None = field(
        default=None,
        metadata=described(
            "For an ONNX file: which subgraph a node or tensor is in, why that stays as it is, and which matcher gave "
            "up on the node.",
            WHAT,
            metavar="NODE|NAME",
        ),
    )


def inspect_engine(given: dict[str, Any], as_json: bool) -> None:
    """Print what a plan, report, rewritten model, bundle or engine contains.

    No GPU is needed: for an engine this shows size and what was verified when it was built.
    """
    options = InspectOptions(**given)
    if options.why is not None:
        _explain(options.path, options.why, as_json)
        return
    check_exists(options.path)  # before imports that take seconds
    from trt_nvfp4 import api
    from trt_nvfp4.builder.report.inspected import as_dict, tables

    found = api.inspect(options.path)
    if as_json:
        print_json(json.dumps(as_dict(found), indent=2, default=str))
        return
    for table in tables(found):
        output.print(table)


def _explain(path: Path, name: str, as_json: bool) -> None:
    check_model_file(path)  # before imports that take seconds
    from trt_nvfp4 import api
    from trt_nvfp4.builder.report.why import tables

    found = api.why(path, name)
    if as_json:
        print_json(json.dumps({"kind": "why", **asdict(found)}, indent=2))
        return
    for table in tables(found):
        output.print(table)


app = Command("inspect-engine", InspectOptions, inspect_engine)

if __name__ == "__main__":
    app()
