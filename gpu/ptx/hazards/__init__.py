"""Hazards: races, missing fences, uninitialised reads, by happens-before and without luck.

``detector.py`` is what the executor tells of accesses and synchronisation; ``clocks.py`` knows who
has seen what, ``shadow.py`` who touched which bytes last, ``registers.py`` what tensor cores hold.
"""
