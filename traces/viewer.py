"""Opens a trace in the interactive viewer, which needs Textual (the extra ``viewer``)."""

from __future__ import annotations

from traces.drawing import Drawing, View
from traces.events import Trace, TraceError
from traces.theme import UNICODE


def open_viewer(trace: Trace, view: View | None = None) -> None:
    """Shows the trace in the terminal until the user leaves; ``view``: where it begins.

    TraceError if Textual is not installed, if the trace has no events, and as
    `traces.terminal.show`.
    """
    view = view or View()
    if not trace.events:
        raise TraceError(f"{trace.name!r} has no events to look at")
    _ = Drawing(trace, view, UNICODE, width=80).selection  # raises what is wrong with the view
    try:
        from traces.viewer_app import ViewerApp
    except ImportError as error:
        raise TraceError(
            "the interactive viewer needs Textual; install it with: pip install 'simkit[viewer]'"
        ) from error
    ViewerApp(trace, view).run()
