"""``--set NAME=VALUE``: sizes, flags, lengths, numbers and words."""

from __future__ import annotations

import numpy as np
import pytest

from simkit.cli.settings import Lengths, Setting, by_request, parse_settings, settings_text
from simkit.errors import SimkitError

KNOWN = (
    Setting("n", 1, "a size", least=0),
    Setting("is", False, "a flag", kind="flag"),
    Setting("lens", Lengths((3,)), "lengths", least=0, kind="lengths"),
    Setting("any", Lengths((3,)), "lengths of any range", least=None, kind="lengths"),
    Setting("x", 0.5, "a number", least=0, kind="number"),
    Setting("word", "a", "a word", kind="word", choices=("a", "b", "c")),
)


def test_later_settings_win_and_n_sets_both_lengths() -> None:
    known = (
        Setting("n", None, "both", sets=("q_len", "kv_len")),
        Setting("q_len", 1, "queries"),
        Setting("kv_len", None, "keys", like="q_len"),
    )
    assert parse_settings("a", known, []) == {"q_len": 1, "kv_len": 1}
    assert parse_settings("a", known, ["n=8", "kv_len=3"]) == {"q_len": 8, "kv_len": 3}
    assert parse_settings("a", known, ["kv_len=3", "n=8"]) == {"q_len": 8, "kv_len": 8}
    with pytest.raises(SimkitError, match="a has no setting ''"):
        parse_settings("a", known, ["=3"])


def test_each_kind_of_setting() -> None:
    values = parse_settings(
        "a", KNOWN, ["n=1_000", "is=yes", "lens=0,17, 2_048", "any=-4", "x=2.5", "word=c"]
    )
    assert values == {
        "n": 1000, "is": True, "lens": (0, 17, 2048), "any": (-4,), "x": 2.5, "word": "c"
    }  # fmt: skip
    text = settings_text(values)
    assert text == "n=1000 is=true lens=0,17,2048 any=-4 x=2.5 word=c"
    # What is printed can be given again.
    assert parse_settings("a", KNOWN, text.split()) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n=-1", "--set n=-1: it must be from 0 to 2147483647"),
        ("lens=1,x", "--set lens=1,x: it must be a whole number, or some with commas"),
        ("lens=", "--set lens=: it must be a whole number, or some with commas"),
        ("lens=1,-1", "--set lens=1,-1: it must be from 0 to 2147483647"),
        (f"any={2**63}", "it must be from -9223372036854775808 to 9223372036854775807"),
        ("x=1e", "--set x=1e: it must be a number"),
        ("x=nan", "--set x=nan: it must be a number"),
        ("x=-0.5", "--set x=-0.5: it must be 0 or more"),
        ("word=d", "--set word=d: it is a, or one of b, c"),
        ("is=2", "--set is=2: it is true or false"),
    ],
)
def test_settings_refuse(text: str, message: str) -> None:
    with pytest.raises(SimkitError) as error:
        parse_settings("a", KNOWN, [text])
    assert str(error.value).endswith(message)


def test_lengths_by_request() -> None:
    values = {"batch": 3, "a": Lengths((7,)), "b": Lengths((1, 2))}
    (alone,) = by_request(values, "a")
    assert alone.tolist() == [7, 7, 7]
    assert alone.dtype == np.int64
    # Who lists lengths says how many requests there are.
    assert [x.tolist() for x in by_request(values, "a", "b")] == [[7, 7], [1, 2]]
    with pytest.raises(SimkitError, match="a has 3 lengths and b has 2 lengths"):
        by_request({**values, "a": Lengths((1, 2, 3))}, "a", "b")
