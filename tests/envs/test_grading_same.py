"""What counts as the same answer, and what does not."""

# ruff: noqa: RUF001 - characters that look like others are part of the cases

from __future__ import annotations

import pytest

from mrgym.errors import ConfigError
from mrgym_envs.grading import Options, Verdict, grade, grade_batch

SAME = [
    (r"\sqrt{7}", r"\boxed{\sqrt{7} \approx 2.646}"),
    ("10", r"{5 \choose 2}"),
    (r"\frac{1}{2}", r"1 \over 2"),
    (r"\begin{pmatrix} 1/2 \\ 1/3 \end{pmatrix}", r"\frac16\begin{pmatrix}3\\2\end{pmatrix}"),
    (r"\text{even}", "The function is even."),
    ("Yes", "Yes, it is."),
    (r"\frac{\sqrt{6}+\sqrt{2}}{4}", r"\sin 75^\circ"),
    ("(-1,2) \\cup (2, 3)", r"(-1, 3) \setminus \{2\}"),
    ("3x - 2y = 7", r"y = \frac{3x-7}{2}"),
    (r"\$1,234.50", r"1234.50 \text{ dollars}"),
    ("(a,b) = (1,2)", "a=1, b=2"),
    (r"\frac{\sqrt2}{2}", r"1/\sqrt{2}"),
    (r"\frac{\sqrt2}{2}", r"\sqrt{0.5}"),
    ("x^2+y^2=4", "y^2 + x^2 = 4"),
    ("x^2+y^2=4", "x^2+y^2-4=0"),
    (r"(-\infty,0)\cup(0,\infty)", r"x \neq 0"),
    (r"(-\infty,0)\cup(0,\infty)", r"\mathbb{R}\setminus\{0\}"),
    (r"(-\infty,0)\cup(0,\infty)", r"x<0 \text{ or } x>0"),
    (r"x<2 \text{ or } x>5", r"(-\infty,2)\cup(5,\infty)"),
    ("[2,5]", r"2 \le x \le 5"),
    ("3+4i", "4i+3"),
    (r"e^{i\pi/3}", r"\frac12+\frac{\sqrt3}{2}i"),
    (r"6.02 \times 10^{23}", "6.02e23"),
    (r"\$5.00", "5 dollars"),
    ("5", "£5"),
    (r"1 \pm 2i", "1+2i, 1-2i"),
    (r"0.1\overline{6}", r"\frac16"),
    (r"\frac{\ln 3}{\ln 2}", r"\log_2 3"),
    ("120", "5!"),
    ("1024", "2^{10}"),
    (r"\sqrt{12}", r"2\sqrt3"),
    (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"),
    (r"\sin(2x)", r"2\sin x\cos x"),
    (r"\cos^2 x - \sin^2 x", r"\cos 2x"),
    (r"\frac{\pi}{6}", r"30^\circ"),
    (r"30^\circ", "30"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\{1,2\}", "1 and 2"),
    ("1, 2", r"x=1 \text{ or } x=2"),
    ("x=3", "3"),
    ("(1,2)", "x=1, y=2"),
    ("x = 1, y = 2", "(1,2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\langle 1, 2\rangle"),
    (r"33\frac13\%", r"\frac13"),
    (r"50\%", "0.5"),
    (r"50\%", "50"),
    ("y=2x+1", "y = 1+2x"),
    ("y=2x+1", "2x-y+1=0"),
    ("x^2+2x+1", "(x+1)^2"),
    ("2^{n+1}", r"2\cdot 2^n"),
    ("4^n", "2^{2n}"),
    (r"\frac{n(n+1)}{2}", r"\binom{n+1}{2}"),
    (r"\log 8", r"3\log 2"),
    (r"\ln(xy)", r"\ln x+\ln y"),
    (r"\frac{1}{2}\ln 2", r"\ln\sqrt2"),
    (r"\text{Yes}", "yes"),
    (r"\text{no solution}", "No solution."),
    (r"\emptyset", r"\{\}"),
    (r"\infty", "infinity"),
    ("10:20", "1:2"),
    ("2:3", r"\frac23"),
    ("1,000,000", "1000000"),
    ("1000000", r"1\,000\,000"),
    (r"-\frac{3}{4}", r"\frac{-3}{4}"),
    (r"-\frac{3}{4}", "-.75"),
    (r"\frac13", "0.33333333"),
    (r"2\frac12", "2.5"),
    (r"\frac{5}{2}", "2 1/2"),
    (r"7\text{ cm}", "7"),
    (r"7\text{ cm}", "7 cm"),
    (r"12 \text{ square feet}", "12 ft^2"),
    (r"x \ge 3", r"[3,\infty)"),
    ("3x+2y=6", r"y=3-\frac32x"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{1}{1+\sqrt2}", r"\sqrt2-1"),
    (r"\sqrt[3]{16}", r"2\sqrt[3]{2}"),
    ("-2", r"\sqrt[3]{-8}"),
    (r"\arctan 1", r"\frac{\pi}{4}"),
    (r"\sin 60^\circ", r"\frac{\sqrt3}{2}"),
    (r"\tan^{-1}(1)", r"\pi/4"),
    ("i^2", "-1"),
    ("|x|", r"\sqrt{x^2}"),
    (r"\frac{a}{b}", "a/b"),
    ("a^{-1}", r"\frac1a"),
    (r"\lfloor 2.5\rfloor", "2"),
    (r"\sum_{k=1}^{10} k", "55"),
    (r"\sum_{k=1}^\infty \frac{1}{k^2}", r"\frac{\pi^2}{6}"),
    (r"\int_0^1 x dx", r"\frac12"),
    (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}"),
    (r"1,2,\ldots,n", "1, 2, ..., n"),
    (r"1-\frac1e", "1-e^{-1}"),
    ("f(x)=x^2+1", "x^2+1"),
    (r"\frac{3}{2}x", "1.5x"),
    ("100", "1e2"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    (r"\mathbb{R}", "all real numbers"),
    ("-3 < x < 3", "(-3,3)"),
    ("-3 < x < 3", "|x|<3"),
    (r"x \equiv 3 \pmod 7", r"x\equiv 3 \pmod{7}"),
    ("(3,-1)", "(3, -1)"),
    ("2x^2-3x+1", "(2x-1)(x-1)"),
    (r"\frac{x}{x+1}", r"1-\frac{1}{x+1}"),
    ("a+b", "b+a"),
    ("abc", "cba"),
    (r"\frac{25}{4}\pi", r"6.25\pi"),
    (r"\frac{2\pi}{3}", r"\frac23\pi"),
    (r"150 \text{ minutes}", "150 min"),
    ("3.50", "3.5"),
    (r"\$3.50", "$3.50"),
    (r"\sqrt{x}\cdot\sqrt{x}", "x"),
    (r"1\frac{1}{2}\text{ hours}", "1.5 hours"),
    (r"\dfrac{1}{2}, \dfrac{1}{3}", "1/3, 1/2"),
    (r"2 \text{ or } 3", "3, 2"),
    ("(x-1)(x+2)=0", "x^2+x-2=0"),
    (r"\left\{\frac{1}{2}\right\}", r"\frac12"),
    ("0.5", ".50"),
    ("x^{3/2}", r"x\sqrt{x}"),
    ("11_{2}", "11_2"),
    ("11_{2}", "11"),
    (r"\angle ABC = 60^\circ", "60"),
    (r"m\angle A = 60", r"60^\circ"),
    (r"k=\frac12", r"\frac12"),
    (r"\frac{1}{2} \text{ or } 0.5", "0.5"),
    (r"\cot x", r"\frac{\cos x}{\sin x}"),
    (r"y=\pm 2", "2,-2"),
    (r"x \in \{1,2\}", "1, 2"),
    (r"n \in \mathbb{Z}", r"n\in\mathbb{Z}"),
    ("5x(x+2)", "5x^2+10x"),
    (r"x=\frac{\pi}{2}+2k\pi", r"\frac{\pi}{2}+2\pi k"),
    ("-x+2", "2-x"),
    (r"4.5 \times 10^{-3}", "0.0045"),
    (r"\frac{22}{7}", r"3\frac{1}{7}"),
    ("6x + 5 > 2", "6x+5>2"),
    ("0", "-0"),
    (r"\begin{cases} x=1 \\ y=2 \end{cases}", "x=1, y=2"),
    (r"\overline{AB}", r"\overline{AB}"),
    (r"\vec{a}+\vec{b}", r"\vec{b}+\vec{a}"),
    (r"3\mathbf{i}+4\mathbf{j}", "3i+4j"),
    (r"12\%", "12 percent"),
    ("1/2", "50%"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt 3}"),
    (r"\sqrt{-4}", "2i"),
    ("(1+i)^2", "2i"),
    ("two", "2"),
    ("2", "two"),
    ("-1", "i^2"),
    (r"x=2 \text{ and } y=3", "(x,y)=(2,3)"),
    (r"15 \text{ or } 15.0", "15"),
    ("1", "0^0"),
    ("13", "13.0"),
    ("42", "４２"),
    ("42", "٤٢"),
    ("-5", "−5"),
    ("20:34", "08:34 P.M."),
    ("1000.99", "1000,99"),
    ("2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}"),
    (r"1\leq|z|\leq \frac{3}{2}", r"z \in [-\frac{3}{2}, -1] \cup [1, \frac{3}{2}]"),
    ("V_{1}:V_{2}=11:21", "11:21"),
    (r"\frac{NO}{BO}=\frac{1}{\sqrt{6}}", r"\frac{1}{\sqrt{6}}"),
    (r"\frac{\sqrt{3}}{2}", "0.8660254037844386"),
    (r"\binom{20}{10}^2 - \binom{20}{9}^2", "5924217936"),
]
DIFFERENT = [
    (r"\sqrt{7}", "2.646"),
    (r"\text{even}", "The function is not even."),
    ("(1,2),(3,4)", "(2,1),(4,3)"),
    ("a=1,b=2", "(a,b)=(2,1)"),
    (r"k \leq 3", "k < 3"),
    ("x^2+y^2=4", "x^2+y^2=5"),
    ("(2,5)", r"2 \le x \le 5"),
    ("3+4i", "3-4i"),
    (r"\sqrt{3+2\sqrt2}", r"1+\sqrt3"),
    ("30", r"31^\circ"),
    ("1, 2", "1"),
    ("x=3", "y=3"),
    ("x=1,y=2", "x=2,y=1"),
    ("x=1,y=2", "2,1"),
    ("50", r"50\%"),
    ("0.5", "50"),
    ("y=2x+1", "y=2x+2"),
    (r"\text{Yes}", "no"),
    (r"\infty", r"-\infty"),
    (r"\frac13", "0.33"),
    ("1.5", r"\frac32000"),
    (r"7\text{ cm}", r"7\text{ m}"),
    ("x", r"\sqrt{x^2}"),
    ("1,2,...,n", "1,3,5,...,2n-1"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    (r"1-\frac1e", r"1+\frac{1}{\mathrm{e}}"),
    ("1", "21"),
    ("(3,-1)", "(-1,3)"),
    ("11_2", "12_2"),
    (r"\pm 2", "2"),
    ("-x+2", "x-2"),
    (r"\pi", "22/7"),
    ("x", r"\sqrt{x^2}"),
    ("1", r"\frac{1}{0}"),
    ("0", r"\infty-\infty"),
    ("5", r"\pm 5"),
    ("42", "41=42"),
    ("0.1", "0.1000001"),
    ("100000000000000000000", r"1.00000000000000000001 \times 10^{20}"),
    ("10^{-9}", r"2 \cdot 10^{-9}"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    ("1", "2^{2^{-1000}}"),
    ("10^{200}", r"\sqrt{10^{400}+1}"),
    ("7 = 11a+c", "11a+c"),
    ("[1, 2, 3]", "(1, 3, 2)"),
    ("2x+4y-3=0", "0"),
    (r"\pi", "3.14159"),
    ("17.001", "17"),
    ("1", "21"),
    ("x > 5", "x < 5"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_same(gold, answer):
    verdict = grade(gold=gold, answer=answer)
    assert verdict.correct, verdict
    assert verdict.status == "correct"


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold, answer):
    verdict = grade(gold=gold, answer=answer)
    assert not verdict.correct, verdict


@pytest.mark.parametrize(
    ("gold", "answer"), [("1/2", "0.5"), ("2", "3"), (r"\sqrt{8}", r"2\sqrt2")]
)
def test_numbers_compare_alike_both_ways(gold, answer):
    assert grade(gold=gold, answer=answer).correct == grade(gold=answer, answer=gold).correct


@pytest.mark.parametrize(
    "gold", ["", " ", "see figure", "N/A", "?", r"\frac", "((", "2 +", "a?b", "1/0"]
)
def test_a_gold_that_cannot_be_read_is_reported_and_never_right(gold):
    verdict = grade(gold=gold, answer=gold)
    assert verdict.status == "bad_gold"
    assert not verdict.correct


@pytest.mark.parametrize(
    "answer", ["", r"\boxed{\frac}", r"\boxed{Eq(x, 2, 3)}", r"\boxed{4\u200b2}", "(("]
)
def test_an_answer_that_cannot_be_read_is_not_called_wrong(answer):
    answer = answer.replace("\\u200b", "\u200b")
    assert grade(gold="42", answer=answer).status == "unparsed"


def test_a_verdict_says_what_was_read():
    verdict = grade(gold=r"so $\boxed{1/2}$", answer=r"thus \boxed{0.6}")
    assert verdict == Verdict("incorrect", "0.6", "1/2", "not equal")


@pytest.mark.parametrize(
    ("percent", "right"),
    [
        ("value", (True, True, False)),
        ("strict", (True, False, False)),
        ("ignore", (False, True, True)),
    ],
)
def test_percent_policy(percent, right):
    pairs = [(r"50\%", "0.5"), (r"50\%", "50"), ("50", r"50\%")]
    verdicts = [grade(gold=g, answer=a, percent=percent) for g, a in pairs]
    assert tuple(v.correct for v in verdicts) == right


def test_order_policy():
    assert grade(gold="1, 2", answer="2, 1").correct
    assert not grade(gold="1, 2", answer="2, 1", ordered=True).correct
    assert grade(gold=r"\{1, 2\}", answer="2, 1", ordered=True).correct


def test_digits_policy():
    assert not grade(gold=r"\pi", answer="3.1416").correct
    assert grade(gold=r"\pi", answer="3.1416", digits=5).correct
    assert not grade(gold=r"\pi", answer="3.1417", digits=4).correct


def test_batch_gives_the_verdicts_of_single_calls_in_order():
    pairs = [*SAME[::7], *DIFFERENT[::5], (r"\sin(2x)", r"2\sin x\cos x")]
    assert grade_batch(pairs) == [grade(gold=g, answer=a) for g, a in pairs]


def test_options_are_checked():
    with pytest.raises(ConfigError, match="percent"):
        grade(gold="1", answer="1", percent="maybe")
    with pytest.raises(ConfigError, match="digits"):
        Options(digits=0)
    with pytest.raises(ConfigError, match="timeout"):
        grade(gold="1", answer="1", timeout=0)


def test_arguments_are_keywords():
    with pytest.raises(TypeError):
        grade("1", "1")
