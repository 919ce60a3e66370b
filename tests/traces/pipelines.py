"""Traces for the tests: a warp-specialised pipeline by hand, and strategies of any trace."""

from __future__ import annotations

from hypothesis import strategies as st

from traces.events import KINDS, UNITS, Counter, Event, Flow, Trace, Track

TMA = Track("producer", "TMA")
BARRIER = Track("warpgroup 0", "barrier")
TENSOR = Track("warpgroup 0", "tensor core")
MUFU = Track("warpgroup 0", "MUFU")


def pipeline(tiles: int = 3, load: int = 180, product: int = 250, name: str = "pipeline") -> Trace:
    """``tiles`` of K: a copy, a wait for it, S, its exponentials and O, one after another; a copy
    that has arrived is told 20 cycles later.
    """
    events: list[Event] = []
    flows: list[Flow] = []
    copied = done = 0
    for tile in range(tiles):
        events.append(Event(f"K{tile}", "load", TMA, copied, load, {"bytes": 16384}))
        copied += load
        told = copied + 20
        start = max(done, told)
        if start > done:
            events.append(Event(f"wait K{tile}", "wait", BARRIER, done, start - done))
            flows.append(Flow(f"full {tile}", TMA, copied, BARRIER, told))
            flows.append(Flow(f"go {tile}", BARRIER, start, TENSOR, start))
        exp = start + product
        out = exp + 100
        events.append(Event(f"S{tile}", "mma", TENSOR, start, product))
        events.append(Event(f"exp {tile}", "softmax", MUFU, exp, 100))
        events.append(Event(f"O{tile}", "mma", TENSOR, out, product))
        flows.append(Flow(f"S{tile}", TENSOR, exp, MUFU, exp))
        flows.append(Flow(f"P{tile}", MUFU, out, TENSOR, out))
        done = out + product
    return Trace(name, tuple(events), (TMA, BARRIER, TENSOR, MUFU), flows=tuple(flows))


def grid(sms: int = 132) -> Trace:
    """A grid of CTAs, of which the last SM has one more than the others."""
    events = []
    for sm in range(sms):
        track = Track(f"SM {sm}", "CTA slot 0")
        events += [
            Event(f"CTA {sm + sms * cta}", "compute", track, 100 * cta, 90)
            for cta in range(3 if sm < sms - 1 else 4)
        ]
    return Trace("grid", tuple(events))


times = st.floats(0, 1e9) | st.integers(0, 10**9)
text = st.text(max_size=8)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any trace, with arrows whose ends are often those of events."""
    tracks = draw(st.lists(st.builds(Track, text, text), min_size=1, max_size=5, unique=True))
    arguments = st.dictionaries(text, text | st.integers() | st.booleans() | times, max_size=3)
    events = []
    for track in tracks:
        # Neighbours touch, lie apart, or have no duration.
        ends = sorted(draw(st.lists(st.integers(0, 10**6), max_size=8)))
        for start, stop in zip(ends[::2], ends[1::2], strict=False):
            kind = draw(st.sampled_from(sorted(KINDS)))
            events.append(Event(draw(text), kind, track, start, stop - start, draw(arguments)))
    counters = [
        Counter(name, process, tuple((time, draw(times)) for time in sorted(moments)))
        for (name, process), moments in draw(
            st.dictionaries(
                st.tuples(text, text), st.lists(times, min_size=1, max_size=4), max_size=3
            )
        ).items()
    ]
    flows = []
    ends_of_events = [0, *(event.stop for event in events), *(event.start for event in events)]
    moments = st.sampled_from(ends_of_events) | times
    for _ in range(draw(st.integers(0, 6))):
        start, stop = sorted((draw(moments), draw(moments)))
        source, target = draw(st.sampled_from(tracks)), draw(st.sampled_from(tracks))
        flows.append(Flow(draw(text), source, start, target, stop))
    unit = draw(st.sampled_from(UNITS))
    return Trace(draw(text), tuple(events), tuple(tracks), tuple(counters), tuple(flows), unit)
