"""Hazards: races, missing fences, uninitialised reads, by happens-before and without luck.

``detector.py`` is what the executor tells of accesses and synchronisation; ``clocks.py`` knows who
has seen what, ``mbarriers.py`` and ``order.py`` how that is passed on, ``shadow.py`` who touched
which bytes last, ``findings.py`` what was found.  ``registers.py`` reads the program's text,
``costs.py`` the counters.
"""
