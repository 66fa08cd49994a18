"""Finding the answer in a response."""

# ruff: noqa: RUF001 - the characters that look like others are what this is about

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from mrgym_envs.grading.boxes import last_boxed, without_echoes

__all__ = ["extract", "extract_gold", "visible"]

_THINK_END: Final = re.compile(r"</(?:think|thinking|thought)>", re.IGNORECASE)
_THINK_START: Final = re.compile(r"<(?:think|thinking|thought)>", re.IGNORECASE)
_NEXT_TURN: Final = re.compile(r"<\|im_start\|>\s*(?:user|system)|<\|start_header_id\|>\s*user")
_SPECIAL: Final = re.compile(r"<\|[a-z_]{1,30}\|>(?:assistant\b)?|</?s>", re.IGNORECASE)
_TEMPLATE: Final = re.compile(r"final answer:\s{0,9}the final answer is\b:?", re.IGNORECASE)
_HASHES: Final = re.compile(r"####[ \t]*([^\n]+)")
_HEADING: Final = re.compile(r"[^\W\d_]{3,}\s+[^\W\d_]{3,}|^\W*(?:step|part|case)\b", re.IGNORECASE)
_ANCHOR: Final = re.compile(
    r"(?:(?:final\s+)?answer(?:\*\*)?\s{0,9}(?:is|are|:|=)|final answer|答案(?:是|为|為)?|réponse|"
    r"respuesta|antwort|resposta|risposta|ответ|^[ \t]*a(?=:)|^[ \t]*ans(?:wer)?(?=[:.]))"
    r"(?:\s{0,9}(?:(?:is|are|est|es|ist)\b|[:：=é]))?",
    re.IGNORECASE | re.MULTILINE,
)
_OPENING: Final = re.compile(r"\A(?:\\?[\"“”'`]|[\s:*=：])+")
_BOLD: Final = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])")
_SENTENCE: Final = re.compile(r"[.!?](?:\s|$)|。|\n\s{0,9}\n")
_MATH: Final = re.compile(
    r"\$\$(?P<display>.{1,2000}?)\$\$|(?<![\\\w])\$(?P<inline>(?:\\\$|[^$\n]|\n(?!\s{0,9}\n)){1,2000}?)"
    r"(?<!\\)\$(?![\d<])|\\\((?P<round>.{1,2000}?)\\\)|\\\[(?P<square>.{1,2000}?)\\\]",
    re.DOTALL,
)
_DANGLING: Final = re.compile(r"<<|^\s*[=*/]|[-+*/=<>,(]\s*$")
_LINK: Final = re.compile(r"\s{0,9}(?:[,;]?\s{0,9}(?:and|or)|[,;])\s{0,9}")
_COMMAND: Final = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|operatorname|mbox|begin|end)\s{0,9}\{[^{}]*\}|\\[a-zA-Z]+"
)
_WORD: Final = re.compile(r"[^\W\d_]{2,}")
_MATH_WORDS: Final = frozenset(
    "sin cos tan sec csc cot log ln sqrt pi infinity inf and or exp frac theta percent pct "
    "percentage cm mm km kg degrees degree square units unit feet inches meters dollars cents "
    "hours minutes days weeks years for some".split()
)
_SHORT_WORDS: Final = frozenset(
    "we the so is of to it are was has he she get at on by be as you its his her".split()
)
_NUMBER: Final = re.compile(
    r"(?:(?<![^\s(=:$*~≈£€\[{])[-−+]\s?)?(?<![A-Za-z\d_.,/^\\])\$?"
    r"(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+)?(?![A-Za-z_]{0,3}\d)(?:\s?\\?%|\s?percent)?"
)
_FRACTION: Final = re.compile(r"-?\s?\d{0,30}\s?\\(?:[dtc]?frac|sqrt)\b")
_GROUP: Final = re.compile(r"[(\[{][^()\[\]{}\n]{1,80},[^()\[\]{}\n]{1,80}[)\]}]")
_OR: Final = re.compile(r"\bor\s*(?:\$|\\\(|\*\*)?\s*$", re.IGNORECASE)
_GIVES_UP: Final = re.compile(
    r"\bI\s+(?:do\s+not|don['’]t|cannot|can['’]t|could\s+not)\s+(?:know|solve|determine|answer)\b",
    re.IGNORECASE,
)
_STRONG: Final = re.compile(r"(?<!\w)__([^_A-Za-z\n]{1,80})__(?!\w)")
_CODE: Final = re.compile(r"__\w+__|\blambda\b[^\n]*:|\b(?:exec|eval|open|getattr)\(")
_MAX_WHOLE: Final = 400
_MAX_SCANNED: Final = 100_000
_MAX_FORMULAS: Final = 1000


def visible(response: str) -> str:
    """Return what a response shows: the text after its last think block, without special tokens."""
    if "<" in response:
        parts = _THINK_END.split(response)
        if len(parts) == 1 and _THINK_START.search(response):
            return ""
        response = parts[-1]
        response = _NEXT_TURN.split(response, maxsplit=1)[0] if "<|" in response else response
        response = _SPECIAL.sub("", response)
    return response.strip()


def extract(response: str) -> str | None:
    r"""Return the text of the answer, ``None`` where there is none.

    What is marked counts first, the last mark of all: ``\\boxed{}``, ``<answer>``, ``####``, and
    ``Final Answer: The final answer is``. Then come "the answer is", a response that is nothing
    but an answer, the last formula, and the last number.
    """
    text = without_echoes(visible(response))
    if not text:
        return None
    marked = _marked(text)
    if marked is not None:
        position, content = marked
        return None if _GIVES_UP.search(text, position) else content.strip() or None
    if "boxed{" in text and re.search(r"boxed\s?\{[^{}]*$", text):
        return None
    return _unmarked(text)


def extract_gold(gold: str) -> str:
    """Return the answer in a gold, which may be bare or a whole solution."""
    gold = gold.strip()
    marked = _marked(gold)
    if marked is not None:
        return marked[1].strip()
    *_, last = [None, *_ANCHOR.finditer(gold)]
    return gold[last.end() :].strip() if last else gold


def _marked(text: str) -> tuple[int, str] | None:
    """Return where the last marked answer ends, and the answer."""
    found: list[tuple[int, int, str]] = []
    if box := last_boxed(text):
        found.append((box.start, box.end, box.content))
    if "<answer>" in text:
        start = text.rindex("<answer>") + len("<answer>")
        inside = text[start:].partition("</answer>")[0]
        found.append((start, start + len(inside), _inner(inside)))
    if "####" in text:
        *_, last = _HASHES.finditer(text) if _HASHES.search(text) else [None]
        if last is not None and not _HEADING.search(last[1]):
            found.append((last.start(), last.end(), _before_prose(last[1])))
    *_, template = [None, *_TEMPLATE.finditer(text)]
    if template is not None:
        found.append((template.start(), template.end(), _after(text[template.end() :]) or ""))
    if not found:
        return None
    _, end, content = max(found, key=lambda mark: mark[0])
    return end, content


def _before_prose(text: str) -> str:
    """Return the number that a line begins with if prose without numbers follows it."""
    number = _NUMBER.match(text)
    if number is None or not _prose(text) or re.search(r"\d", text[number.end() :]):
        return text
    return number[0]


def _inner(text: str) -> str:
    box = last_boxed(text)
    if box is not None:
        return box.content
    return text.strip()


def _unmarked(text: str) -> str | None:
    text = _STRONG.sub(r"\1", text) if "__" in text else text
    if _CODE.search(text) or _GIVES_UP.search(text, max(0, len(text) - 200)):
        return None
    *_, anchor = [None, *_ANCHOR.finditer(text)]
    if anchor is not None and (found := _after(text[anchor.end() :])):
        return found
    if len(text) <= _MAX_WHOLE and not _prose(text) and "\n\n" not in text:
        return text
    return _last_formula(text) or _last_number(text)


def _after(tail: str) -> str | None:
    """Return the answer right after words that announce one."""
    tail = _BOLD.sub("", _OPENING.sub("", tail[:_MAX_SCANNED], count=1))
    formula = next(_formulas(tail), None)
    if formula is not None and not formula.start():
        return _with_following(tail, formula)
    sentence = _SENTENCE.split(tail, maxsplit=1)[0].strip()
    if sentence and len(sentence) <= _MAX_WHOLE and not _prose(sentence):
        return sentence
    found = _last_formula(sentence) or _last_fraction(sentence)
    if found:
        return found
    return _last_number(sentence) if "=" in sentence else _first_number(sentence)


def _with_following(tail: str, formula: re.Match[str]) -> str:
    """Return a formula with those it forms a list with: ``$1$ and $2$``."""
    end = formula.end()
    while (more := _MATH.search(tail, end)) and _LINK.fullmatch(tail, end, more.start()):
        end = more.end()
    return tail[:end]


def _prose(text: str) -> bool:
    """Whether a text is more than a formula with a unit."""
    words = [word.lower() for word in _WORD.findall(_COMMAND.sub(" ", text))]
    long = [word for word in words if len(word) > 3 and word not in _MATH_WORDS]
    if _all_words(text):
        return False
    return len(long) > (1 if text[:1].isdigit() else 0) or not _SHORT_WORDS.isdisjoint(words)


def _all_words(text: str) -> bool:
    return not re.search(r"[\d=+^\\$]", text) and len(text.split()) <= 12


def _last_formula(text: str) -> str | None:
    """Return the last formula between dollar signs or LaTeX brackets."""
    if "$" not in text and "\\" not in text:
        return None
    text = text[-_MAX_SCANNED:]
    chain: list[re.Match[str]] = []
    for formula in _formulas(text):
        linked = chain and _LINK.fullmatch(text, chain[-1].end(), formula.start())
        chain = [*chain, formula] if linked else [formula]
    return ", ".join(map(_content, chain)) or None


def _formulas(text: str) -> Iterator[re.Match[str]]:
    """Yield the formulas of a text; a dollar sign that opens none is one of money."""
    position = 0
    for _ in range(_MAX_FORMULAS):
        match = _MATH.search(text, position)
        if match is None:
            return
        content = _content(match)
        position = match.end()
        if _DANGLING.search(content) or _prose(content):
            position = match.start() + (2 if match[0].startswith("$$") else 1)
        elif content:
            yield match


def _content(formula: re.Match[str]) -> str:
    return next(filter(None, formula.groups()), "").strip()


def _last_fraction(text: str) -> str | None:
    """Return a LaTeX fraction or root that stands without dollar signs, if it comes last."""
    *_, start = [None, *_FRACTION.finditer(text)]
    if start is None:
        return None
    end, groups = start.end(), 1 if "sqrt" in start[0] else 2
    while groups and (group := re.compile(r"\s?(?:\{[^{}]*\}|\d)").match(text, end)):
        end, groups = group.end(), groups - 1
    if groups or any(m.start() >= end for m in _NUMBER.finditer(text)):
        return None
    return text[start.start() : end].strip()


def _first_number(text: str) -> str | None:
    match = next((m for m in _NUMBER.finditer(text) if _stands_alone(text, m)), None)
    return match[0].strip() if match else None


def _last_number(text: str) -> str | None:
    """Return the last number; with an ``or`` before it, the alternatives are part of the answer."""
    text = text[-_MAX_SCANNED:]
    if fraction := _last_fraction(text):
        return fraction
    last = None
    for match in _NUMBER.finditer(text):
        if _stands_alone(text, match):
            last = match
    if last is None:
        return None
    *_, group = [None, *_GROUP.finditer(text)]
    if group is not None and group.end() > last.end() and not _prose(group[0]):
        return group[0]
    before = text[max(0, last.start() - 60) : last.start()]
    if not _OR.search(before):
        return last[0].strip()
    other = _last_number(_OR.sub("", before).rstrip(" ,"))
    return f"{other}, {last[0].strip()}" if other else None


def _stands_alone(text: str, match: re.Match[str]) -> bool:
    """Whether a number is not part of a name such as A2B."""
    following = text[match.end() : match.end() + 1]
    return not (
        following.isascii()
        and following.isalpha()
        and match.start()
        and text[match.start() - 1].isalpha()
    )
