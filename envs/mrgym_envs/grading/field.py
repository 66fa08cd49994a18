"""Proving identities by exact arithmetic modulo a prime (Schwartz-Zippel).

Rational functions, roots and Pythagorean identities hold at a random point of a prime field only
if they hold everywhere, up to odds of about one in 2**60. What is no field operation (pi, ln, an
exponential) is a random element of its own, so that agreement is proof and disagreement is not.
The primes are safe primes ``p = 2q + 1`` with ``p % 8 == 7`` and the small primes as squares:
odd roots are unique, and the square root that is itself a square respects products.
"""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from typing import Final

from mrgym_envs.grading.exact import rational
from mrgym_envs.grading.floats import NoValueError, Sample, whole_bounds
from mrgym_envs.grading.tree import Add, Call, Const, Mul, Node, Num, Percent, Pow, Sym

__all__ = ["PRIMES", "Field", "same_in_fields"]

PRIMES: Final = (4611686018427079679, 4611686018427065399)
_MAX_FACTORIAL: Final = 20_000
_TRIGONOMETRIC: Final = frozenset(["sin", "cos", "tan", "sec", "csc", "cot"])


def same_in_fields(left: Node, right: Node) -> bool:
    """Return whether two expressions are equal as a matter of algebra."""
    try:
        return all(_agree(Field(prime), left, right) for prime in PRIMES)
    except (NoValueError, ZeroDivisionError, ValueError, OverflowError):
        return False


def _agree(field: Field, left: Node, right: Node) -> bool:
    return field.value(left) == field.value(right)


class Field:
    """Evaluates nodes modulo a prime, with variables at random squares.

    Args:
        prime: The modulus.
        point: Which of the endless points to take.
    """

    def __init__(self, prime: int, point: int = 0) -> None:
        self.prime = prime
        self.point = point
        self.bound: dict[str, int] = {}

    def value(self, node: Node) -> int:
        """Return the value of a node.

        Raises:
            NoValueError: If there is no rule for it.
            ZeroDivisionError: If something is divided by zero.
        """
        match node:
            case Num(value, _):
                return self._fraction(value)
            case Sym(name):
                return self.bound[name] if name in self.bound else self._square("variable", name)
            case Const("pi" | "e" as name):
                return self._square("constant", name)
            case Add(args):
                return sum(map(self.value, args)) % self.prime
            case Mul(args):
                return self._product(args)
            case Percent(arg):
                return self.value(arg) * self._inverse(100) % self.prime
            case Pow(base, exp):
                return self._power(base, exp)
            case Call(name, args):
                return self._call(name, args)
        raise NoValueError(type(node).__name__)

    def _random(self, *what: object) -> int:
        text = repr((self.point, what)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest()) % self.prime

    def _square(self, *what: object) -> int:
        return pow(self._random(*what), 2, self.prime)

    def _inverse(self, value: int) -> int:
        if not value % self.prime:
            raise ZeroDivisionError
        return pow(value, -1, self.prime)

    def _fraction(self, value: Fraction) -> int:
        if value.denominator == 1:
            return value.numerator % self.prime
        return value.numerator * self._inverse(value.denominator) % self.prime

    def _product(self, args: tuple[Node, ...]) -> int:
        product = 1
        for arg in args:
            product = product * self.value(arg) % self.prime
        return product

    def _power(self, base: Node, exp: Node) -> int:
        exponent = rational(exp)
        if exponent is not None:
            return self._rational_power(self.value(base), exponent)
        return self._exponential(base, exp)

    def _rational_power(self, value: int, exponent: Fraction) -> int:
        degree = exponent.denominator
        while degree % 2 == 0:
            value, degree = self._square_root(value), degree // 2
        if degree > 1:
            value = pow(value, pow(degree, -1, self.prime - 1), self.prime)
        if exponent < 0 and not value:
            raise ZeroDivisionError
        return pow(value, exponent.numerator, self.prime)

    def _square_root(self, value: int) -> int:
        """Return the root that is a square, times a stand-in for the root of -1 if need be."""
        root = pow(value, (self.prime + 1) // 4, self.prime)
        if root * root % self.prime == value:
            return root
        return root * self._random("root of -1") % self.prime

    def _exponential(self, base: Node, exp: Node) -> int:
        """Return a power with variables in the exponent, by the laws of exponents."""
        product = 1
        for term in exp.args if isinstance(exp, Add) else (exp,):
            factor, rest = _split(term)
            if rest is None:
                part = self._rational_power(self.value(base), factor)
            else:
                part = self._rational_power(self._basic_power(base, rest), factor)
            product = product * part % self.prime
        return product

    def _basic_power(self, base: Node, exponent: Node) -> int:
        """Return a stand-in for a power, one for every prime factor of a whole base."""
        value, power = rational(base), self.value(exponent)
        if value is None or value <= 0 or max(value.numerator, value.denominator) > 10**6:
            return self._square("power", self.value(base), power)
        product = 1
        for prime, times in _factors(value).items():
            part = self._square("power", prime, power)
            product = product * pow(part, times, self.prime) % self.prime
        return product

    def _call(self, name: str, args: tuple[Node, ...]) -> int:
        if name in _TRIGONOMETRIC and len(args) == 1:
            return self._trigonometric(name, self.value(args[0]))
        if name in ("ln", "log", "lg"):
            return self._logarithm(name, args)
        if name == "exp":
            return self._exponential(Const("e"), args[0])
        if name in ("sum", "prod"):
            return self._series(name, args)
        if name == "factorial" and (n := rational(args[0])) is not None:
            return self._factorial(n)
        return self._square("call", name, tuple(map(self.value, args)))

    def _trigonometric(self, name: str, angle: int) -> int:
        """Return a point on the unit circle that belongs to the angle."""
        sign = 1 if angle <= self.prime // 2 else -1
        t = self._random("angle", min(angle, self.prime - angle)) if angle else 0
        scale = self._inverse(1 + t * t)
        sine, cosine = sign * 2 * t * scale % self.prime, (1 - t * t) * scale % self.prime
        top, bottom = {
            "sin": (sine, 1), "cos": (cosine, 1), "tan": (sine, cosine),
            "cot": (cosine, sine), "sec": (1, cosine), "csc": (1, sine),
        }[name]  # fmt: skip
        return top * self._inverse(bottom) % self.prime

    def _logarithm(self, name: str, args: tuple[Node, ...]) -> int:
        base = {"lg": Num(Fraction(10))}.get(name) if len(args) == 1 else args[1]
        value = self._natural_logarithm(args[0])
        if base is None:
            return value
        return value * self._inverse(self._natural_logarithm(base)) % self.prime

    def _natural_logarithm(self, node: Node) -> int:
        if node == Const("e"):
            return 1
        value = rational(node)
        if value is not None and value > 0 and max(value.numerator, value.denominator) <= 10**6:
            logs = (self._random("ln", p) * n for p, n in _factors(value).items())
            return sum(logs) % self.prime
        if isinstance(node, Pow):
            exponent = self.value(node.exp)
            return exponent * self._natural_logarithm(node.base) % self.prime
        return self._random("ln of", self.value(node))

    def _series(self, name: str, args: tuple[Node, ...]) -> int:
        body, variable, lower, upper = args
        low, high = whole_bounds(Sample().value, lower, upper)
        if not isinstance(variable, Sym) or variable.name in self.bound:
            raise NoValueError(name)
        total = int(name == "prod")
        for index in range(low, high + 1):
            self.bound[variable.name] = index % self.prime
            value = self.value(body)
            total = (total * value if name == "prod" else total + value) % self.prime
        self.bound.pop(variable.name, None)
        return total

    def _factorial(self, n: Fraction) -> int:
        if n.denominator != 1 or not 0 <= n <= _MAX_FACTORIAL:
            return self._square("factorial", n)
        product = 1
        for factor in range(2, n.numerator + 1):
            product = product * factor % self.prime
        return product


def _split(term: Node) -> tuple[Fraction, Node | None]:
    """Return the rational factor of a term and what is left."""
    value = rational(term)
    if value is not None:
        return value, None
    if not isinstance(term, Mul):
        return Fraction(1), term
    factor, rest = Fraction(1), []
    for arg in term.args:
        value = rational(arg)
        if value is None:
            rest.append(arg)
        else:
            factor *= value
    return factor, rest[0] if len(rest) == 1 else Mul(tuple(rest))


def _factors(value: Fraction) -> dict[int, int]:
    """Return the prime factors of a small rational with their powers."""
    factors: dict[int, int] = {}
    for number, sign in ((value.numerator, 1), (value.denominator, -1)):
        rest, prime = number, 2
        while prime <= math.isqrt(rest):
            while rest % prime == 0:
                factors[prime] = factors.get(prime, 0) + sign
                rest //= prime
            prime += 1
        if rest > 1:
            factors[rest] = factors.get(rest, 0) + sign
    return factors
