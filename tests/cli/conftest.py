"""A command line to call: in this process, 80 columns wide, without colour."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from simkit.cli.app import app

Cli = Callable[..., Result]

COPIED = ("  case: ", "  repeat: ", "saved ")  # lines to copy stay whole


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Calls ``simkit`` with the given words and checks that its exit code is ``code``."""
    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)

    def call(*words: object, code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        lines = result.stdout.splitlines()
        assert not [line for line in lines if len(line) > 80 and not line.startswith(COPIED)]
        return result

    return call
