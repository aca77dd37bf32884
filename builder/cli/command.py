"""Commands made from classes of options (see `builder.options`): parsing, grouped help, spellings that have changed."""

import importlib.metadata
import inspect
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from trt_nvfp4.builder import errors
from trt_nvfp4.builder.cli.console import failures, let_go_of_streams, print_failure
from trt_nvfp4.builder.options import Entry, Options, entries_of
from trt_nvfp4.builder.report.command_line import command_line
from trt_nvfp4.builder.terminal.output import naming, output

EXIT_CODES = (
    "Exit codes: 0 done; 2 usage (options, shapes, a plan or calibration data that do not fit); "
    "3 the model, engine or bundle is at fault or missing; 4 target, back end or compiler unavailable; "
    "5 verification failed; 6 build failed (full disks included); 130 interrupted; "
    "141 the reader of the output, such as head, closed the pipe; 1 a defect of this program."
)
ARGUMENTS = "Arguments"
GENERAL = "General"
SETTINGS = "Settings (--set KEY=VALUE)"


class Command(click.Command):
    """A command that calls `run(given, as_json)`, with the options that were given by their names.

    `extra` follows "unexpected extra argument" in a message. Wrong options are JSON on stdout where --json asks for it,
    and the command ends as `failures` says where help or a message cannot be written.
    """

    def __init__(
        self, name: str, options: type[Options], run: Callable[[dict[str, Any], bool], None], extra: str = ""
    ) -> None:
        self.entries, self._groups = entries_of(options), options.GROUPS
        self._run, self._extra = run, extra
        super().__init__(
            name,
            params=[*map(_parameter, self._shown(is_setting=False)), *self._general()],
            callback=self._call,
            help=inspect.cleandoc(run.__doc__ or ""),
            epilog=EXIT_CODES,
            context_settings={"max_content_width": 120},
        )

    def _shown(self, *, is_setting: bool) -> list[Entry]:
        return [entry for entry in self.entries if entry.option.is_setting == is_setting]

    def _general(self) -> Iterator[click.Option]:
        if self._shown(is_setting=True):
            yield click.Option(
                ["--set", "settings"],
                multiple=True,
                metavar="KEY=VALUE",
                help="A setting that is seldom needed; may be given several times. They are listed below.",
            )
        yield click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON on stdout.")
        yield click.Option(["--debug"], is_flag=True, help="Show the traceback of a failure.")
        yield version_option()

    def _call(self, as_json: bool, debug: bool, settings: Sequence[str] = (), **values: Any) -> None:
        paths = [Path(values[entry.name]) for entry in self.entries if entry.is_positional]
        with failures(debug, as_json, *paths):
            given = {name: value for name, value in values.items() if value not in (None, ())}
            self._run({**given, **self._settings(settings)}, as_json)

    def _settings(self, texts: Sequence[str]) -> dict[str, Any]:
        known = {entry.spelling: entry for entry in self._shown(is_setting=True)}
        found: dict[str, Any] = {}
        for text in texts:
            key, equals, value = text.partition("=")
            entry = known.get(key.replace("_", "-"))
            if entry is None:
                raise errors.UsageError(f"--set {text}: no setting {key!r}; known: {', '.join(known)}")
            if not equals or not value:
                raise errors.UsageError(f"--set {text}: expected {_assignment(entry)}")
            if entry.name in found:
                raise errors.UsageError(f"--set {text}: {key} is given twice; leave one out")
            found[entry.name] = _read(entry, value)
        return found

    def groups(self) -> dict[str, list[Entry]]:
        """The options with a flag under their headings, then the settings."""
        headings: dict[str, list[Entry]] = {title: [] for title in self._groups} | {
            SETTINGS: self._shown(is_setting=True)
        }
        for entry in self._shown(is_setting=False):
            if not entry.is_positional:
                headings[entry.option.group].append(entry)
        return {title: entries for title, entries in headings.items() if entries}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """By group, then what all commands have, then the settings."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in (ARGUMENTS, *self._groups, GENERAL)}
        entries = {entry.name: entry for entry in self.entries}
        for parameter in self.get_params(ctx):
            entry = entries.get(parameter.name or "")
            if isinstance(parameter, click.Argument):
                assert entry is not None
                groups[ARGUMENTS].append((parameter.make_metavar(ctx), entry.option.help))
            elif (record := parameter.get_help_record(ctx)) is not None:
                groups[GENERAL if entry is None else entry.option.group].append(record)
        groups[SETTINGS] = [(_assignment(entry), help_of(entry)) for entry in self._shown(is_setting=True)]
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def main(self, *rest: Any, **extra: Any) -> Any:
        before = command_line.set("")
        try:
            return super().main(*rest, **extra)
        finally:
            command_line.reset(before)
            let_go_of_streams()

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        as_json = "--json" in args
        command_line.set(shlex.join([info_name or "", *args]))
        try:
            with failures("--debug" in args, as_json), naming(errors.STDOUT):  # of help
                return super().make_context(info_name, args, *rest, **extra)
        except click.UsageError as error:
            text = errors.printable(self._explained(error))
            if as_json:
                print_failure(text, error.exit_code)
            _show(click.UsageError(text, error.ctx))
            raise click.exceptions.Exit(error.exit_code) from None

    def _explained(self, error: click.UsageError) -> str:
        """With the new spelling of an option, and what an extra argument may have been meant for."""
        if isinstance(error, click.NoSuchOption):
            for entry in self._shown(is_setting=True):
                if error.option_name == f"--{entry.spelling}":
                    return f"{error.option_name} is a setting now: write --set {_assignment(entry)}"
        text = error.format_message()
        return text + self._extra if "unexpected extra argument" in text else text


def _show(error: click.UsageError) -> None:
    try:
        error.show()
    except BrokenPipeError:
        raise click.exceptions.Exit(errors.READER_GONE) from None
    except OSError:  # there is nowhere to say it
        pass


def help_of(entry: Entry) -> str:
    """The help of an option, with its default where the text does not name it."""
    text, default = entry.option.help, entry.default
    if default in (None, False, (), {}, "") or entry.is_required or "default" in text.lower():
        return text
    return f"{text} [default: {'yes' if default is True else default}]"


def metavar_of(entry: Entry) -> str:
    """The placeholder of an option's value; "" for a switch."""
    if entry.choices:
        return f"[{'|'.join(entry.choices)}]"
    if entry.is_a(bool) and (entry.default is True or entry.option.is_setting):
        return "[yes|no]"
    return "" if entry.is_a(bool) else entry.option.metavar or "TEXT"


def _assignment(entry: Entry) -> str:
    return f"{entry.spelling}={metavar_of(entry)}"


def _read(entry: Entry, text: str) -> Any:
    """The value of a setting; its class reads texts of other types."""
    if not entry.is_a(int):
        return text
    try:
        return int(text)
    except ValueError:
        raise errors.UsageError(f"{entry.flag}={text}: expected a whole number") from None


def _parameter(entry: Entry) -> click.Parameter:
    if entry.is_positional:
        return click.Argument([entry.name], metavar=entry.name.upper())
    is_flag = entry.is_a(bool) and entry.default is False
    kind: Any = click.INT if entry.is_a(int) else click.FLOAT if entry.is_a(float) else click.STRING
    # From click 8.3 on, a default of None is a value, and the option would not be missed.
    optional: dict[str, Any] = {} if entry.is_required else {"default": None}
    return click.Option(
        [*entry.option.short, f"--{entry.spelling}", entry.name],
        type=None if is_flag else kind,
        is_flag=is_flag,
        multiple=entry.option.repeats,
        required=entry.is_required,
        **optional,
        metavar=None if is_flag else metavar_of(entry),
        help=help_of(entry),
    )


def version_option() -> click.Option:
    """`--version` of a command."""
    return click.Option(
        ["--version"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_print_version,
        help="Show the version and exit.",
    )


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        output.print(f"trt-nvfp4 {importlib.metadata.version('trt-nvfp4')}", highlight=False)
        context.exit()
