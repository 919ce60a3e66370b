"""Each algorithm as ``run`` and ``trace`` see it: settings, inputs, model, kernel, launches."""

from __future__ import annotations

from simkit.cli.subjects.batch import BATCH_SUBJECTS
from simkit.cli.subjects.block_sparse import BLOCK_SPARSE_SUBJECTS
from simkit.cli.subjects.cache import CACHE_SUBJECTS
from simkit.cli.subjects.cascade import CASCADE_SUBJECTS
from simkit.cli.subjects.dense import DENSE_SUBJECTS
from simkit.cli.subjects.merge import MERGE_SUBJECTS
from simkit.cli.subjects.subject import Subject
from simkit.errors import SimkitError

SUBJECTS: dict[str, Subject] = {
    row.name: row
    for row in (
        *DENSE_SUBJECTS,
        *CACHE_SUBJECTS,
        *BATCH_SUBJECTS,
        *BLOCK_SPARSE_SUBJECTS,
        *MERGE_SUBJECTS,
        *CASCADE_SUBJECTS,
    )
}
"""What ``simkit run`` and ``simkit trace`` take for each kernel of the catalogue."""


def subject(name: str) -> Subject:
    """The subject of that name; SimkitError that lists the names otherwise."""
    if name not in SUBJECTS:
        raise SimkitError(f"no algorithm {name!r}; there are {', '.join(SUBJECTS)}")
    return SUBJECTS[name]
