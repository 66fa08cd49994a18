"""Addresses of services."""

from __future__ import annotations

import ipaddress
import urllib.parse

from mrgym.errors import ConfigError

__all__ = ["checked_url", "is_local"]


def checked_url(url: str) -> str:
    """Return an address without a slash at its end.

    Raises:
        ConfigError: If it is none, or holds what is said otherwise (a user, a query).
    """
    parts = urllib.parse.urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise ConfigError(
            f"make: got address {url!r}, expected http://host:port or https://host:port; write "
            "it without user, query and fragment (a token is passed as token=...)"
        )
    return url.rstrip("/")


def is_local(url: str) -> bool:
    """Return whether an address is this machine's own, which no proxy stands before."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
