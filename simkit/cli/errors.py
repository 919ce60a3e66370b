"""Turns errors of the family, and those of files, into one readable message and exit code 2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer

from simkit.cli.output import error_console
from simkit.errors import SimkitError
from traces.events import TraceError

BAD_INPUT = 2
"""Exit code of a command that could not do what was asked."""
NOT_HELD = 1
"""Exit code of a command whose answer is no: a law failed, a kernel has hazards."""
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended early, with or without results."""

Parameters = ParamSpec("Parameters")


def readable_errors(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """The command, with bad input ending in one message on standard error, not a traceback."""

    @functools.wraps(command)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            raise  # the reader of a pipe has left: no error of the input's
        except (SimkitError, TraceError) as error:
            _fail(str(error))
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except (MemoryError, OverflowError) as error:  # OverflowError: beyond 2^63 bytes
            _fail(f"this does not fit into this computer's memory: {error}")

    return guarded


def _fail(message: str) -> None:
    # Long lines are the terminal's to wrap, so that a message can be searched for and copied.
    error_console().print(f"error: {message}", soft_wrap=True)
    raise typer.Exit(BAD_INPUT)
