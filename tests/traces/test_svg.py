"""The SVG of a view: the same every time, well-formed, nothing fetched."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from pipelines import pipeline

from traces.events import TraceError
from traces.svg import svg
from traces.terminal import ComparisonView, TraceView, View


def texts(image: str) -> str:
    root = ET.fromstring(image)
    found = ("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))
    return "\n".join(found).replace("\xa0", " ")


def test_what_is_drawn_is_in_the_image() -> None:
    image = svg(TraceView(pipeline()), width=100, title="a title")
    found = texts(image)
    for part in ("a title", "producer", "tensor core", "S0", "━", "↓a", "critical path: 2,000"):
        assert part in found


def test_the_image_is_the_same_every_time_and_fetches_nothing() -> None:
    image = svg(TraceView(pipeline()))
    assert svg(TraceView(pipeline())) == image
    assert "@font-face" not in image
    # Addresses are names of vocabularies and of the generator, in no attribute that is followed.
    assert not re.search(r"""(href|src)=|url\((?!#)""", image)


def test_width_is_in_cells() -> None:
    def width(cells: int) -> float:
        return float(
            ET.fromstring(svg(TraceView(pipeline()), width=cells)).attrib["viewBox"].split()[2]
        )

    assert width(200) - width(100) == pytest.approx(100 * 12.2)


def test_themes() -> None:
    def colours(theme: str) -> set[str]:
        view = ComparisonView(pipeline(), pipeline(load=400), View(theme=theme))
        return set(re.findall(r"fill: (#\w+)", svg(view, theme=theme)))

    assert colours("dark") != colours("light")
    with pytest.raises(TraceError, match="theme 'pink' is none of dark, light"):
        svg(TraceView(pipeline()), theme="pink")
