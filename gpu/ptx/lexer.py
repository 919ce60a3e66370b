"""Cuts PTX text into tokens, each with its line.  Source: PTX ISA 8.8, 4.1-4.5."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from simkit.errors import PtxError


@dataclass(frozen=True, slots=True)
class Token:
    """``kind`` is word, directive, number, float, string or punctuation (the sign itself)."""

    kind: str
    text: str
    line: int
    value: int | float = 0


_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f\v]+ | //[^\n]* | /\*.*?\*/)
  | (?P<newline>\n)
  | (?P<float>0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b
      | \d+\.\d*(?:[eE][+-]?\d+)? | \d+[eE][+-]?\d+)
  | (?P<number>0[xX][0-9a-fA-F]+U? | 0[bB][01]+U? | 0[0-7]*U?(?![0-9A-Za-z_]) | [1-9]\d*U?)
  | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<word>[%$A-Za-z_][\w$%]*(?:(?:\.|::)[\w$:]+)*)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<sign>[{}()\[\],;:@!|+\-<>=*&~/?])
    """,
    re.VERBOSE | re.DOTALL,
)


def tokenize(text: str) -> list[Token]:
    """All tokens of a PTX text.  PtxError for a character that starts none."""
    tokens: list[Token] = []
    line = 1
    position = 0
    end = len(text)
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise PtxError(f"PTX line {line}: unexpected character {text[position]!r}")
        kind = match.lastgroup or ""
        piece = match.group()
        position = match.end()
        if kind == "newline":
            line += 1
        elif kind == "space":
            line += piece.count("\n")
        elif kind == "number":
            if position < end and (text[position].isalnum() or text[position] == "_"):
                raise PtxError(f"PTX line {line}: malformed number {piece + text[position]!r}")
            tokens.append(Token(kind, piece, line, _integer(piece)))
        elif kind == "float":
            tokens.append(Token(kind, piece, line, _float(piece)))
        else:
            tokens.append(Token(piece if kind == "sign" else kind, piece, line))
    tokens.append(Token("end", "end of file", line))
    return tokens


def _integer(piece: str) -> int:
    digits = piece.rstrip("U")
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    if digits[:2] in ("0b", "0B"):
        return int(digits[2:], 2)
    if len(digits) > 1 and digits[0] == "0":
        return int(digits, 8)
    return int(digits)


def _float(piece: str) -> float:
    if piece[:2] in ("0f", "0F"):
        return float(struct.unpack("<f", struct.pack("<I", int(piece[2:], 16)))[0])
    if piece[:2] in ("0d", "0D"):
        return float(struct.unpack("<d", struct.pack("<Q", int(piece[2:], 16)))[0])
    return float(piece)
