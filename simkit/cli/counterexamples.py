"""Counter-examples on disk: what ``fuzz`` found, small enough to read, ready to repeat."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from properties.law import CheckResult
from simkit.errors import SimkitError

FOLDER = Path(".simkit/counterexamples")


@dataclass(frozen=True)
class CounterExample:
    """A case, as JSON text, on which a law of an algorithm was violated; ``detail`` says how."""

    algorithm: str
    law: str
    case: str
    on: str
    detail: str


def save_counterexample(result: CheckResult) -> Path:
    """Writes the shrunk case of a failure to a file whose name the case alone decides."""
    found = CounterExample(result.algorithm, result.law, result.case, result.on, result.detail)
    digest = hashlib.sha256(found.case.encode()).hexdigest()[:8]
    path = FOLDER / f"{found.algorithm}-{found.law}-{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    return path


def load_counterexample(path: Path) -> CounterExample:
    """What ``save_counterexample`` wrote; SimkitError for another file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return CounterExample(**{key: str(value) for key, value in data.items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise SimkitError(f"{path} is not a counter-example of simkit fuzz: {error}") from error
