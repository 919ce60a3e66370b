"""The ``simkit`` command: one module of this package for each subcommand."""

from __future__ import annotations

import io
import sys

import typer

from simkit.cli.check import check
from simkit.cli.errors import readable_errors
from simkit.cli.fuzz import fuzz
from simkit.cli.gpus import gpus
from simkit.cli.list import list_algorithms
from simkit.cli.mutate import mutate
from simkit.cli.report import report
from simkit.cli.run import run
from simkit.cli.trace import trace
from simkit.cli.tune import tune
from simkit.cli.verify import verify

app = typer.Typer(
    name="simkit",
    help="Predicts an attention kernel's bits, bytes and cycles, and proves them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for _name, _command in (
    ("list", list_algorithms),
    ("run", run),
    ("verify", verify),
    ("fuzz", fuzz),
    ("mutate", mutate),
    ("trace", trace),
    ("tune", tune),
    ("report", report),
    ("check", check),
    ("gpus", gpus),
):
    app.command(_name)(readable_errors(_command))


def main() -> None:
    """Entry point of the installed command."""
    # Where the output cannot encode a sign, a question mark beats a traceback.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
