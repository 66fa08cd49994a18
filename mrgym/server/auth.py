"""Bearer tokens."""

from __future__ import annotations

import hmac

__all__ = ["authorised"]


def authorised(authorization: str, token: str | None) -> bool:
    """Return whether an ``Authorization`` header carries the token, in constant time."""
    if token is None:
        return True
    scheme, _, given = authorization.partition(" ")
    same = hmac.compare_digest(given.strip().encode(), token.encode())
    return same and scheme.lower() == "bearer"
