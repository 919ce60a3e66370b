"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the results to FILE as JSON, too."),
]
GpuName = Annotated[
    str, typer.Option("--gpu", metavar="NAME", help="The GPU of the device table (simkit gpus).")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A size of the problem; repeat for others."),
]
