"""Exact numbers: literals as fractions, and the comparison that needs no parser."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from mrgym_envs.grading.tree import Num, TooLargeError

__all__ = ["MAX_DIGITS", "number", "plain_number", "same_decimal"]

MAX_DIGITS: Final = 4000
MAX_EXPONENT: Final = 5000
_PLAIN: Final = re.compile(r"\$?([+-]?)(\d{1,300}(?:\.\d{1,300})?|\.\d{1,300})\$?", re.ASCII)
_GROUPED: Final = re.compile(r"([+-]?)\$?(\d{1,3}(?:,\d{3}){1,60}(?:\.\d{1,300})?)", re.ASCII)


def number(text: str) -> Num:
    """Return an unsigned literal such as ``12``, ``.5`` or ``1.5e3``.

    Raises:
        TooLargeError: If it has too many digits.
    """
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent) > 6 or abs(int(exponent or 0)) > MAX_EXPONENT:
        raise TooLargeError("number with too many digits")
    whole, _, fraction = mantissa.partition(".")
    power = int(exponent or 0) - len(fraction)
    value = Fraction(int(whole + fraction)) * Fraction(10) ** power
    return Num(value, len((whole + fraction).lstrip("0")) if fraction else 0)


def plain_number(text: str) -> Fraction | None:
    """Return the value of a text that is nothing but a decimal, ``None`` for any other text."""
    if len(text) < 300 and text.isascii() and text.isdigit():
        return Fraction(int(text))
    match = _PLAIN.fullmatch(text) or _GROUPED.fullmatch(text)
    if match is None:
        return None
    sign, digits = match.groups()
    return Fraction(sign + digits.replace(",", ""))


def same_decimal(decimal: Num, value: float | Fraction) -> bool:
    """Return whether a decimal is a number cut or rounded to the digits that are written."""
    unit = Fraction(1)
    size = abs(decimal.value)
    while size and size * unit < Fraction(10) ** (decimal.digits - 1):
        unit *= 10
    while size and size * unit >= Fraction(10) ** decimal.digits:
        unit /= 10
    return abs(decimal.value - Fraction(value)) * unit < 1
