"""inspect-engine: what a plan, report, rewritten model, bundle or engine holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trt_nvfp4.builder.cli.console import DEBUG, EXIT_CODES, JSON, VERSION, Command, failures, output, print_json

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command(cls=Command, epilog=EXIT_CODES)
def inspect_engine(
    path: Annotated[
        Path, typer.Argument(help="A plan (.yaml), report (.json), ONNX file, engine, bundle, or folder of parts.")
    ],
    why: Annotated[
        str | None,
        typer.Option(
            help="Of an ONNX file: which subgraph a node or tensor is in, why that stays as it is, and which matcher "
            "gave up on the node.",
            metavar="NODE|NAME",
        ),
    ] = None,
    as_json: Annotated[bool, JSON] = False,
    debug: Annotated[bool, DEBUG] = False,
    version: Annotated[bool, VERSION] = False,
) -> None:
    """Print what a plan, report, rewritten model, bundle or engine contains.

    No GPU is needed: for an engine this shows size and what was verified when it was built.
    """
    with failures(debug, as_json):
        if why is not None:
            _explain(path, why, as_json)
            return
        from trt_nvfp4 import api
        from trt_nvfp4.builder.report.inspected import as_dict, tables

        found = api.inspect(path)
        if as_json:
            print_json(json.dumps(as_dict(found), indent=2, default=str))
            return
        for table in tables(found):
            output.print(table)


def _explain(path: Path, name: str, as_json: bool) -> None:
    from trt_nvfp4.builder.model_files import check_model_file

    check_model_file(path)  # before imports that take seconds
    from trt_nvfp4 import api
    from trt_nvfp4.builder.report.why import tables

    found = api.why(path, name)
    if as_json:
        print_json(json.dumps({"kind": "why", **asdict(found)}, indent=2))
        return
    for table in tables(found):
        output.print(table)


if __name__ == "__main__":
    app()
