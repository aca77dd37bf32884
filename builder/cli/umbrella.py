"""trt-nvfp4: one command in front of all others."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

from trt_nvfp4.builder.cli.command import EXIT_CODES, version_option

#: Modules of this package by the command's name; each has an `app`. One is imported when it is called.
COMMANDS = {
    "build": "build_engine",
    "compare": "compare_engine",
    "bench": "bench_engine",
    "generate": "generate",
    "inspect": "inspect_engine",
    "serve": "serve",
    "doctor": "doctor",
}


class Umbrella(click.Group):
    """Hands the arguments behind a command's name to that command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context | None, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        found: click.Command = importlib.import_module(f"trt_nvfp4.builder.cli.{COMMANDS[name]}").app
        return found

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        command = self.get_command(None, given[0]) if given else None
        if command is None:
            return super().main(given, *rest, **{**extra, "prog_name": "trt-nvfp4"})
        return command.main(given[1:], *rest, **{**extra, "prog_name": f"trt-nvfp4 {given[0]}"})


app = Umbrella(
    "trt-nvfp4",
    help="From a model to a verified TensorRT engine with NVFP4 plugins, and to its users.",
    epilog=EXIT_CODES,
    params=[version_option()],
)

if __name__ == "__main__":
    app()
