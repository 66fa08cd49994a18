"""What the verifiers adapter says where verifiers is not installed."""

from __future__ import annotations

import sys

import pytest

from mrgym.adapters import verifiers as mrgym_verifiers
from mrgym.errors import MissingExtraError


@pytest.mark.parametrize("name", ["taskset", "from_verifiers"])
def test_the_extra_is_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "verifiers.v1", raising=False)
    with pytest.raises(MissingExtraError, match=r"verifiers: not installed.*mrgym\[verifiers\]"):
        getattr(mrgym_verifiers, name)("math_multi_reward")
