"""Units of measure, to the extent that two answers may contradict each other in them."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["same_units"]

_NAMES: Final = {
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "inch": "in inch inches",
    "foot": "ft foot feet",
    "yard": "yd yard yards",
    "mile": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "second": "s sec secs second seconds",
    "minute": "min mins minute minutes",
    "hour": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years",
    "cent": "cent cents",
    "dollar": "dollar dollars usd",
}
_CANONICAL: Final = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_UNIT: Final = re.compile(
    r"\d\s*(?:\\[,;! ])*\s*(?:\\(?:text|mathrm|textbf|mbox|rm)\s*\{\s*)?\s*([A-Za-z]{1,12})"
    r"\.?\s*\}?\s*(?:\^\s*\{?\s*(\d)\s*\}?|([²³]))?[\s$.)\]\\]*"
)


def same_units(gold: str, answer: str) -> bool:
    """Return whether two answers agree in the unit of measure, where both give one that is known.

    Args:
        gold: The gold answer.
        answer: The answer.
    """
    units = _unit(gold), _unit(answer)
    return None in units or units[0] == units[1]


def _unit(text: str) -> tuple[str, str] | None:
    """Return the unit and power that a text ends with."""
    match = _UNIT.search(text, max(0, len(text) - 80))
    if match is None or match.end() != len(text):
        return None
    unit = _CANONICAL.get(match[1].lower())
    power = match[2] or {"²": "2", "³": "3"}.get(match[3] or "", "1")
    return (unit, power) if unit else None
