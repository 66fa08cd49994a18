"""Turning the many ways an answer is typed into plain ASCII LaTeX, before it is parsed."""

# ruff: noqa: RUF001 - the characters that look like others are what this is about

from __future__ import annotations

import re
import unicodedata
from typing import Final

from mrgym_envs.grading.tree import UnreadableError

__all__ = ["clean", "strip_markup", "words_of"]

_GREEK: Final = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta",
    "η": "eta", "θ": "theta", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi",
    "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "ϕ": "phi", "χ": "chi",
    "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda",
    "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_SIGNS: Final = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-", "＋": "+",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "∗": "*",
    "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "∞": r"\infty ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∖": r"\setminus ", "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ",
    "°": r"^{\circ}", "º": r"^{\circ}", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"',
    "…": r"\ldots ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "∠": r"\angle ", "△": r"\triangle ", "％": "%",
    "，": ",", "、": ",", "；": ";", "：": ":", "（": "(", "）": ")", "［": "[", "］": "]",
    "【": "[", "】": "]", "｛": "{", "｝": "}", "＝": "=", "＜": "<", "＞": ">", "／": "/",
    "。": ".", "．": ".", "⟨": r"\langle ", "⟩": r"\rangle ", "∑": r"\sum ", "∫": r"\int ",
    "∏": r"\prod ", "→": r"\to ", "ⅇ": "e", "ⅈ": "i", "∣": "|", "⁄": "/",
}  # fmt: skip
_FRACTIONS: Final = {
    "½": "1}{2", "⅓": "1}{3", "⅔": "2}{3", "¼": "1}{4", "¾": "3}{4", "⅕": "1}{5", "⅖": "2}{5",
    "⅗": "3}{5", "⅘": "4}{5", "⅙": "1}{6", "⅚": "5}{6", "⅛": "1}{8", "⅜": "3}{8", "⅝": "5}{8",
    "⅞": "7}{8",
}  # fmt: skip
_SUPERSCRIPTS: Final = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_SUBSCRIPTS: Final = "₀₁₂₃₄₅₆₇₈₉"
_RAISED: Final = str.maketrans(_SUPERSCRIPTS, "0123456789+-")
_LOWERED: Final = str.maketrans(_SUBSCRIPTS, "0123456789")
_TABLE: Final = str.maketrans(
    {k: f"\\{v} " for k, v in _GREEK.items()}
    | _SIGNS
    | {k: rf"\frac{{{v}}}" for k, v in _FRACTIONS.items()}
)
_SUPERSCRIPT: Final = re.compile(f"[{_SUPERSCRIPTS}]+")
_SUBSCRIPT: Final = re.compile(f"[{_SUBSCRIPTS}]+")
_UNWANTED: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Mn", "Me"})
_EDGES: Final = " \t\r\n\u200b\u200c\u200d\u2060\ufeff"

_ESCAPED: Final = re.compile(r"\\\\(?=[a-zA-Z])")
_THOUSANDS: Final = re.compile(
    r"(?<![\d.,])(\d{1,3}(?:(?:\{,\}|,?\s{0,3}\\[!,]\s{0,3}|,)\d{3})+)(?!\d|(?:\{,\}|,)\d)"
)
_NOT_DIGITS: Final = re.compile(r"[^\d]")
_SPACED: Final = re.compile(r"(?<![\d.,])\d{1,3}(?:\s{0,3},?\s{0,3}\\[!,]\s{0,3}\d{3})+(?!\d)")
_REPEATING: Final = re.compile(r"(\d{0,50})\.(\d{0,50})\\overline\{(\d{1,50})\}")
_FONT: Final = re.compile(
    r"\\(?:mathrm|mathbf|mathit|mathsf|mathcal|mathnormal|boldsymbol|bm|operatorname\*?|"
    r"textnormal|textbf|textit|textrm|textsf|mbox|text|bf|rm)\b"
)
_BREAKS: Final = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![a-zA-Z])\.?"
)


def clean(text: str) -> str:
    """Return an answer in ASCII LaTeX.

    Raises:
        UnreadableError: If it holds characters that show nothing or change what is shown.
    """
    text = text.strip(_EDGES)
    if not text.isascii() or not text.isprintable():
        text = _ascii(text)
    if "$" in text:
        text = text.replace(r"\$", " ").replace("$", " ")
    if "\\" in text:
        text = _tidy_latex(text)
    return _join_thousands(_trimmed(text))


def _trimmed(text: str) -> str:
    """Return the text without closing punctuation and stray backslashes."""
    while (shorter := text.strip().rstrip(".,;:").removesuffix("\\!").rstrip("\\")) != text:
        text = shorter
    return text


def _ascii(text: str) -> str:
    text = "".join(map(_plain, text.translate(_TABLE)))
    text = _SUPERSCRIPT.sub(lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    return _SUBSCRIPT.sub(lambda m: f"_{{{m[0].translate(_LOWERED)}}}", text)


def _plain(char: str) -> str:
    if char.isascii() and (char.isprintable() or char in "\n\t\r"):
        return char
    category = unicodedata.category(char)
    if category in _UNWANTED:
        raise UnreadableError(f"character U+{ord(char):04X}")
    if category == "Nd":
        return str(unicodedata.digit(char))
    if category == "Zs":
        return " "
    if category == "Sc":
        return " "
    if "\uff00" < char < "\uff5f" or "\U0001d400" <= char <= "\U0001d7ff":
        return unicodedata.normalize("NFKC", char)
    return char


def _tidy_latex(text: str) -> str:
    if r"\begin" not in text:
        text = _ESCAPED.sub(r"\\", text)
    text = _BREAKS.sub(" ", text)
    text = _REPEATING.sub(_fraction, text)
    for delimiter in (r"\(", r"\)", r"\[", r"\]"):
        text = text.replace(delimiter, " ")
    return _SPACED.sub(lambda m: _NOT_DIGITS.sub("", m[0]), text)


def _fraction(match: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction."""
    whole, fixed, repeated = match.groups()
    top = int(whole + fixed + repeated) - int((whole + fixed) or 0)
    return rf"(\frac{{{top}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}})"


def _join_thousands(text: str) -> str:
    """Take the commas out of 1,234,567, but not out of (1,234) or {100,200, 300}."""
    if "," not in text:
        return text
    bracketed = any(c in text for c in "([") or r"\{" in text or text.startswith("{")
    spaced = re.search(r",\s", text) is not None
    pattern = _THOUSANDS if not bracketed or spaced else _BRACED
    return pattern.sub(lambda m: _NOT_DIGITS.sub("", m[1]), text)


_BRACED: Final = re.compile(r"(?<![\d.,])(\d{1,3}(?:\{,\}\d{3})+)(?!\d)")


def strip_markup(text: str) -> str:
    """Return a text without LaTeX fonts, dollar signs, braces and markdown, on one line."""
    text = _FONT.sub("", text)
    text = re.sub(r"\\[,;:! ]|\\quad|[${}]|\\[()\[\]]", " ", text)
    text = re.sub(r"\*\*|__|`", "", text)
    return " ".join(text.split()).strip(" .,;:!")


def words_of(text: str) -> str:
    """Return the text normal form: case, spacing, fonts and closing punctuation do not count."""
    words = strip_markup(text)
    return words if len(words) == 1 else words.casefold()
