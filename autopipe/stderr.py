"""What the command line says on stderr: progress, and each error in one line."""

from __future__ import annotations

import sys

import typer

from autopipe.core.errors import AutopipeError
from autopipe.core.joined import is_first


def say(message: str) -> None:
    """A line under the command's name."""
    print(f"autopipe: {message}", file=sys.stderr)


def progress(message: str) -> None:
    """A line that tells how far it is; of several processes from the first one only."""
    if is_first():
        print(message, file=sys.stderr, flush=True)


def line_of(error: Exception) -> str:
    """A user's mistake as it is; anything else by its name, with the way to its traceback."""
    if isinstance(error, AutopipeError):
        return f"error: {error}"
    if hasattr(error, "format_message"):  # what typer says of arguments
        return f"error: {_usage(error.format_message(), getattr(error, 'ctx', None))}"
    said = str(error).strip().splitlines()
    return f"unexpected {type(error).__name__}: {said[0] if said else 'no message'} (run again with --debug)"


def _usage(said: str, context: typer.Context | None) -> str:
    """What is wrong with the arguments, in one line, and whose help says more."""
    command = context.command_path if context else "autopipe"
    words = " ".join(said.split()).rstrip(".")
    return f"{words[:1].lower()}{words[1:]}: see {command} --help"
