"""What an expression cannot do, in words: it has no value until the plan runs.

Python would answer with a TypeError that says nothing of what to write instead. Knows nothing of
how expressions are made.
"""

from __future__ import annotations

from typing import NoReturn

from brickline.errors import SymbolicError


class WithoutValue:
    """Refuses what needs a value, or has no integer for a result.

    Two expressions are equal where they are the same object, so ``==`` is none of this.
    """

    __slots__ = ()

    def __lt__(self, other: object) -> NoReturn:
        self._refuse_order("<", other)

    def __le__(self, other: object) -> NoReturn:
        self._refuse_order("<=", other)

    def __gt__(self, other: object) -> NoReturn:
        self._refuse_order(">", other)

    def __ge__(self, other: object) -> NoReturn:
        self._refuse_order(">=", other)

    def __truediv__(self, other: object) -> NoReturn:
        self._refuse_division(f"{self} / {other}")

    def __rtruediv__(self, other: object) -> NoReturn:
        self._refuse_division(f"{other} / {self}")

    def __pow__(self, other: object) -> NoReturn:
        raise SymbolicError(
            f"expected + - * // % of integers, got {self} ** {other}; write the product, as in "
            "n * n"
        )

    def __int__(self) -> NoReturn:
        raise SymbolicError(
            f"expected a number, got {self}, which has no value until it is evaluated; its bounds "
            "are .low and .high"
        )

    def _refuse_order(self, sign: str, other: object) -> NoReturn:
        raise SymbolicError(
            f"expected numbers to compare, got {self} {sign} {other}, which has no value until it "
            "is evaluated; take minimum(a, b) or maximum(a, b), or compare .low and .high"
        )

    def _refuse_division(self, got: str) -> NoReturn:
        raise SymbolicError(
            f"expected a whole number, got {got}; write a // b to round down, or ceil_div(a, b)"
        )
