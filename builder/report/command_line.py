"""The command that is running, for what a run writes about itself; empty where the API is called."""

from contextvars import ContextVar

command_line: ContextVar[str] = ContextVar("command_line", default="")
