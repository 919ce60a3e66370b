"""The size of an attention problem, as schedules see it: no values, only how many."""

from __future__ import annotations

from dataclasses import dataclass

from simkit.errors import ShapeError


@dataclass(frozen=True)
class AttentionShape:
    """Every head of every sequence of a batch: [q_len, d] by [kv_len, d] by [kv_len, d_v].

    ``causal`` masks are aligned bottom right. ``element``: bytes of a value of Q, K and V.
    `ShapeError` for a size below 1 or heads that kv_heads does not divide.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    d: int
    causal: bool = False
    kv_heads: int = 0  # 0: as many as heads
    d_v: int = 0  # 0: d
    element: int = 2

    def __post_init__(self) -> None:
        for name in ("kv_heads", "d_v"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.heads if name == "kv_heads" else self.d)
        for name in ("batch", "heads", "q_len", "kv_len", "d", "kv_heads", "d_v", "element"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ShapeError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def flop(self) -> int:
        """By the convention of the published figures: a causal mask halves the work."""
        every = 2 * self.batch * self.heads * self.q_len * self.kv_len * (self.d + self.d_v)
        return every // 2 if self.causal else every

    @property
    def kv_bytes(self) -> int:
        """Of K and V, read once."""
        return self.batch * self.kv_heads * self.kv_len * (self.d + self.d_v) * self.element

    @property
    def q_bytes(self) -> int:
        return self.batch * self.heads * self.q_len * self.d * self.element

    @property
    def o_bytes(self) -> int:
        """16 bits a value, whatever those of Q, K and V."""
        return self.batch * self.heads * self.q_len * self.d_v * 2

    def check_16_bits(self, kernel: str) -> None:
        """`ShapeError` for a ``kernel`` of 16-bit values if Q, K and V have others."""
        if self.element != 2:
            raise ShapeError(f"{kernel} takes values of 2 bytes, got {self.element}")

    def visible(self, first_row: int, rows: int) -> int:
        """Keys that some of the rows see."""
        if not self.causal:
            return self.kv_len
        last = min(first_row + rows, self.q_len) - 1
        return max(0, min(self.kv_len, last + self.kv_len - self.q_len + 1))
