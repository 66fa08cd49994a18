"""Cutting a cleaned answer into tokens."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from mrgym_envs.grading.tree import NeedsWorkerError, UnreadableError

__all__ = ["CONSTANTS", "FUNCTIONS", "Token", "tokenize"]


FUNCTIONS: Final = frozenset(
    "sin cos tan sec csc cot arcsin arccos arctan sinh cosh tanh exp log ln lg "
    "gcd lcm max min det Re Im arg sgn sign abs floor ceil asin acos atan".split()
)
CONSTANTS: Final = {
    "pi": "pi", "infty": "oo", "infinity": "oo", "Infinity": "oo", "inf": "oo", "oo": "oo",
    "emptyset": "empty", "varnothing": "empty", "e": "e", "i": "i",
}  # fmt: skip
_GREEK: Final = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho "
    "sigma tau phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell "
    "hbar".split()
)
_SETS: Final = frozenset("RZNQC")
_OPERATORS: Final = {
    "times": "*", "cdot": "*", "ast": "*", "div": "/", "pm": "pm", "mp": "mp", "bmod": "mod",
    "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=",
    "lt": "<", "gt": ">", "ne": "!=", "neq": "!=", "approx": "~", "sim": "~", "simeq": "~",
    "equiv": "equiv", "in": "in", "cup": "cup", "cap": "cap", "setminus": "setminus",
    "backslash": "setminus", "mid": "|", "vert": "|", "lvert": "|", "rvert": "|", "colon": ":",
    "ldots": "dots", "cdots": "dots", "dots": "dots", "dotsc": "dots", "to": "to",
    "rightarrow": "to", "quad": " ", "qquad": " ", "land": ",", "lor": ",", "wedge": ",",
    "vee": ",", "lfloor": "lfloor", "rfloor": "rfloor", "lceil": "lceil", "rceil": "rceil",
    "langle": "(", "rangle": ")", "lbrace": "{.", "rbrace": ".}", "circ": "deg", "degree": "deg",
    "prime": "'", "lbrack": "[", "rbrack": "]", "lVert": "|", "rVert": "|", "notin": "notin",
    "cong": "~", "doteq": "=", "coloneqq": "=",
}  # fmt: skip
_SYMBOLS: Final = {
    r"\{": "{.", r"\}": ".}", r"\%": "%", r"\|": "|", r"\&": "&", r"\_": "_", r"\#": "#",
    "**": "^", "==": "=", "=<": "<=", "=>": ">=", "…": "dots", "...": "dots", "||": "|",
}  # fmt: skip
_SEPARATORS: Final = frozenset("and or for some where with if when while but all any".split())
_PERCENT: Final = frozenset("percent percents pct percentage percentages".split())
_DEGREES: Final = frozenset(["degree", "degrees", "deg"])
_UNITS: Final = frozenset(
    "cm mm km kg mg ml mL ft yd mi lb lbs oz hr hrs min mins sec secs mph kph km/h usd cents cent "
    "sq inches inch in".split()
)
_TEXT_COMMANDS: Final = frozenset(
    "text mbox textbf textit textrm textsf textnormal mathrm mathbf mathit mathsf mathcal "
    "operatorname boldsymbol bm emph underline textup".split()
)
_SKIPPED: Final = frozenset(
    "left right big Big bigg Bigg displaystyle textstyle limits nolimits hline hfill null "
    "smallskip noindent phantom bf rm it relax strut".split()
)
_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|\\[,;:!>\s]|~)
      |(?P<num>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?)
      |(?P<row>\\\\(?:\[[^\]]*\])?)
      |(?P<cmd>\\[a-zA-Z]+\*?)
      |(?P<name>[A-Za-z]+)
      |(?P<op>\\[{}%|&_\#]|\*\*|<=|>=|!=|==|=<|=>|\.\.\.|\|\||[-+*/^_(),;:!|\[\]{}'&%<>=])""",
    re.VERBOSE,
)


class Token(NamedTuple):
    """A token: ``kind`` is num, name, func, cmd, text, sep, deg, begin, end, row or op."""

    kind: str
    text: str


END: Final = Token("stop", "")


def tokenize(text: str, max_tokens: int) -> list[Token]:
    """Return the tokens of a cleaned answer, closed by one of kind ``stop``.

    Raises:
        UnreadableError: If something is no token.
        NeedsWorkerError: If there are more than ``max_tokens``.
    """
    out: list[Token] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise UnreadableError(f"character {text[position]!r}")
        position = match.end()
        if match.lastgroup == "cmd":
            position = _command(text, match[0][1:].rstrip("*"), position, out)
        elif match.lastgroup == "name":
            _name(match[0], out)
        elif match.lastgroup == "op":
            symbol = _SYMBOLS.get(match[0], match[0])
            out.append(Token("op", symbol))
        elif match.lastgroup != "space":
            out.append(Token(str(match.lastgroup), match[0]))
        if len(out) > max_tokens:
            raise NeedsWorkerError("too many tokens")
    out.append(END)
    return out


def _command(text: str, name: str, position: int, out: list[Token]) -> int:
    if name in _TEXT_COMMANDS:
        words, position = _argument(text, position)
        _text(words.strip(), out)
    elif name in ("mathbb", "Bbb"):
        words, position = _argument(text, position)
        out.append(Token("name", f"set:{words.strip()}"))
    elif name in ("begin", "end"):
        words, position = _argument(text, position)
        if name == "begin" and words.startswith("array"):
            _, position = _argument(text, position)
        out.append(Token(name, words.strip().rstrip("*")))
    elif name not in _SKIPPED:
        _word(name, out, escaped=True)
    return position


def _argument(text: str, position: int) -> tuple[str, int]:
    """Return a braced argument, or one character, and where it ends."""
    while position < len(text) and text[position].isspace():
        position += 1
    if position >= len(text) or text[position] != "{":
        return text[position : position + 1], position + 1
    depth, start = 0, position
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[start + 1 : position], position + 1
    raise UnreadableError("unbalanced braces")


def _text(words: str, out: list[Token]) -> None:
    r"""Append what a ``\\text{...}`` says: a letter, a separator, a number, or words."""
    bare = words.strip(" ,.;:()~\\")
    if not bare:
        if "," in words:
            out.append(Token("op", ","))
        return
    lower = bare.lower()
    if len(bare) == 1 and bare.isalpha():
        out.append(Token("name", bare))
    elif lower in _SEPARATORS:
        out.append(Token("sep", lower))
    elif lower in _PERCENT or bare == "%":
        out.append(Token("op", "%"))
    elif bare in FUNCTIONS:
        out.append(Token("func", bare))
    elif re.search(r"[\d\\+=^]", bare):
        out.extend(tokenize(bare.replace("$", " "), len(bare))[:-1])
    else:
        out.append(Token("deg", bare) if lower in _DEGREES else Token("text", bare))


def _name(letters: str, out: list[Token]) -> None:
    """Append a run of plain letters: a known word, an English word, or single variables."""
    lower = letters.lower()
    if lower in _SEPARATORS and len(letters) > 1:
        out.append(Token("sep", lower))
    elif lower in _PERCENT:
        out.append(Token("op", "%"))
    elif lower in _DEGREES:
        out.append(Token("deg", lower))
    elif letters in _UNITS and out and out[-1].kind in ("num", "text"):
        out.append(Token("text", letters))
    elif letters == "in":
        out.append(Token("op", "in"))
    elif letters in FUNCTIONS or letters in ("sqrt", "cbrt", "frac", "binom", "Eq"):
        out.append(Token("func", letters))
    elif letters in CONSTANTS or letters in _GREEK or len(letters) == 1:
        out.append(Token("name", letters))
    elif len(letters) > 3:
        _long_word(letters, out)
    else:
        out.extend(Token("name", letter) for letter in letters)


def _long_word(letters: str, out: list[Token]) -> None:
    """Append a word, split where a function name ends a product such as ``xsin``."""
    known = next((f for f in ("sqrt", "sin", "cos", "tan", "log") if letters.endswith(f)), None)
    if known and len(letters) - len(known) == 1:
        out += [Token("name", letters[0]), Token("func", known)]
    elif out and out[-1].kind == "text":
        out[-1] = Token("text", f"{out[-1].text} {letters}")
    else:
        out.append(Token("text", letters))


def _word(name: str, out: list[Token], *, escaped: bool) -> None:
    """Append a LaTeX command."""
    if name in _OPERATORS:
        operator = _OPERATORS[name]
        if operator == "deg":
            out.append(Token("deg", "deg"))
        elif operator != " ":
            out.append(Token("op", operator))
    elif name in FUNCTIONS:
        out.append(Token("func", name))
    elif name in CONSTANTS or name in _GREEK:
        out.append(Token("name", name))
    elif name.startswith(("quad", "qquad")):
        _name(name.removeprefix("q").removeprefix("uad").removeprefix("quad"), out)
    else:
        out.append(Token("cmd", name))
