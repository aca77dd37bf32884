"""The reference page's tables of options, from the commands: `python -m trt_nvfp4.builder.cli.reference PAGE`."""

import sys
from pathlib import Path

from trt_nvfp4.builder.cli import bench_engine, build_engine, compare_engine, doctor, generate, inspect_engine, serve
from trt_nvfp4.builder.cli.command import Command, metavar_of
from trt_nvfp4.builder.options import Entry

COMMANDS: tuple[Command, ...] = (
    build_engine.app,
    compare_engine.app,
    bench_engine.app,
    generate.app,
    inspect_engine.app,
    serve.app,
    doctor.app,
)
BEGIN, END = "<!-- options: make reference -->\n", "<!-- end of options -->\n"


def tables() -> str:
    """The options of all commands in Markdown."""
    sections = []
    for command in COMMANDS:
        rows = [f"### {command.name}\n", "| option | value | default | |", "|---|---|---|---|"]
        for group, entries in command.groups().items():
            rows += [f"| **{group}** | | | |", *map(_row, entries)]
        sections.append("\n".join(rows) + "\n")
    return "\n".join(sections)


def _row(entry: Entry) -> str:
    default = entry.default
    if entry.is_required:
        shown = "required"
    elif default in (None, (), {}) or default is False:
        shown = ""
    else:
        shown = f"`{'yes' if default is True else default}`"
    value = metavar_of(entry).strip("[]") if entry.choices or entry.is_a(bool) else metavar_of(entry)
    spellings = (entry.spelling,) if entry.option.is_setting else (*entry.option.short, entry.flag)
    name = ", ".join(f"`{spelling}`" for spelling in spellings)
    cells = (name, f"`{value}`" if value else "", shown, entry.option.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def written(page: str) -> str:
    """The page with tables as the commands are."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text()))
