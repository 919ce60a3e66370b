"""Names and order of a Chrome trace's processes and threads, as tracks that are each unique."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from traces.chrome_rules import Row
from traces.events import Track


@dataclass(frozen=True)
class Place:
    """Where events of a file lie: a thread, or what a ``label`` names where there is no thread."""

    pid: Any
    tid: Any
    label: str = ""


class Names:
    """Gives every place of a file its track, with the names and the order of its metadata."""

    def __init__(self, metadata: Iterable[Row]) -> None:
        self.unknown: list[str] = []  # names of metadata that no rule is for
        self._args: dict[tuple[str, Place], Row] = {}
        for row in metadata:
            place = Place(row["pid"], row.get("tid", 0))
            match row["name"]:
                case "process_name" | "process_labels" | "process_sort_index":
                    self._args[row["name"], Place(row["pid"], None)] = row["args"]
                case "thread_name" | "thread_sort_index":
                    self._args[row["name"], place] = row["args"]
                case other:
                    self.unknown.append(other)
        named = (place for what, place in self._args if what == "thread_name")
        self._places = dict.fromkeys(named)
        self._processes: dict[Any, str] = {}
        self._tracks: dict[tuple[Place, int], Track] = {}
        self._taken: set[Track] = set()

    def add(self, places: Iterable[Place]) -> None:
        """Makes the tracks of ``places`` and of all threads that the metadata names."""
        self._places |= dict.fromkeys(places)
        for place in sorted(self._places, key=self._sort_key):
            self.track(place)

    def tracks(self) -> tuple[Track, ...]:
        """All tracks so far, in the order in which they are drawn."""
        order = sorted(self._tracks, key=lambda key: (*self._sort_key(key[0]), key[1]))
        return tuple(self._tracks[key] for key in order)

    def track(self, place: Place, lane: int = 0) -> Track:
        """The track of a place; further lanes are for what overlaps there."""
        key = (place, lane)
        if key not in self._tracks:
            name = self._args.get(("thread_name", place), {}).get("name")
            if name is None:
                name = place.label or f"thread {place.tid}"
            name += f" #{lane + 1}" * (lane > 0)
            process = self.process(place.pid)
            tracks = (Track(process, each) for each in _variants(name, place.tid))
            self._tracks[key] = next(track for track in tracks if track not in self._taken)
            self._taken.add(self._tracks[key])
        return self._tracks[key]

    def process(self, pid: Any) -> str:
        """The process of a pid; its labels tell namesakes apart."""
        if pid not in self._processes:
            place = Place(pid, None)
            name = self._args.get(("process_name", place), {}).get("name", f"process {pid}")
            labels = self._args.get(("process_labels", place), {}).get("labels")
            name += f" ({labels})" if labels else ""
            taken = set(self._processes.values())
            self._processes[pid] = next(one for one in _variants(name, pid) if one not in taken)
        return self._processes[pid]

    def _sort_key(self, place: Place) -> tuple[float, float]:
        process = self._args.get(("process_sort_index", Place(place.pid, None)), {})
        thread = self._args.get(("thread_sort_index", place), {})
        return process.get("sort_index", 0), thread.get("sort_index", 0)


def _variants(name: str, number: Any) -> Iterator[str]:
    """The name, and others for where it is taken."""
    yield name
    yield f"{name} ({number})"
    yield from (f"{name} ({number}, {again})" for again in count(2))
