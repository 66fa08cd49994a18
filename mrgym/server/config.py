"""The settings of a service, checked."""

from __future__ import annotations

import ipaddress
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from mrgym.errors import ConfigError

__all__ = ["ServerConfig"]

_SHORTEST_TOKEN = 16
# What has an effect under some protocols only; everything else has one under all of them.
_HOLDS_FOR: Final = {
    "max_sessions": ("mrgym", "openenv"),
    "idle_timeout": ("mrgym", "openenv"),
    "max_batch": ("mrgym",),
    "scoring": ("mrgym", "nemo-gym"),
    "score_threads": ("mrgym",),
    "score_workers": ("mrgym", "nemo-gym"),
    "score_deadline": ("mrgym", "nemo-gym"),
}
_OF_WORKERS: Final = ("score_workers", "score_deadline")


class ServerConfig(BaseModel):
    """How an environment is served.

    Attributes:
        host: Address to listen on; any but a loopback address needs a token.
        port: Port; 0 takes a free one.
        token: Bearer token that every request but ``GET /health`` must carry; ``None`` asks for
            none.
        protocol: Which interface is spoken: our own, or that of another system.
        max_sessions: Most sessions at a time.
        idle_timeout: Seconds without a request after which a session ends.
        disconnect_grace: Seconds a session is kept for a client whose connection broke in the
            middle of a request, so that it may ask again.
        max_body_bytes: Longest request body.
        max_batch: Most items of one request.
        body_timeout: Seconds a request (its head, and again its body) may take to arrive.
        request_timeout: Seconds the environment may take for one request.
        max_pending: Most scoring requests waiting or running; more are turned away.
        scoring: Where score functions run: threads of the service, or worker processes that can
            be killed when they hang.
        score_threads: Scoring requests that run at a time.
        score_workers: Worker processes.
        score_deadline: Seconds a worker process may take for one completion.
        drain_timeout: Seconds requests in progress may take to finish when the service ends.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    token: SecretStr | None = None
    protocol: Literal["mrgym", "nemo-gym", "openenv"] = "mrgym"
    max_sessions: int = Field(default=64, ge=1)
    idle_timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    disconnect_grace: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    max_body_bytes: int = Field(default=16 << 20, ge=1024)
    max_batch: int = Field(default=1024, ge=1)
    body_timeout: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    request_timeout: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    max_pending: int = Field(default=256, ge=1)
    scoring: Literal["threads", "workers"] = "threads"
    score_threads: int = Field(default=4, ge=1)
    score_workers: int = Field(default=2, ge=1)
    score_deadline: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    drain_timeout: float = Field(default=30.0, gt=0, allow_inf_nan=False)

    @property
    def secret(self) -> str | None:
        """The token as text."""
        return None if self.token is None else self.token.get_secret_value()

    def check_effects(self) -> None:
        """Refuse what was set although it changes nothing here.

        Raises:
            ConfigError: If the protocol, or scoring in threads, has no use for a setting.
        """
        for name in (n for n in _HOLDS_FOR if n in self.model_fields_set):
            option = "--" + name.replace("_", "-")
            if self.protocol not in _HOLDS_FOR[name]:
                raise ConfigError(
                    f"{option}: got {getattr(self, name)} under --protocol {self.protocol}, where "
                    f"it has no effect, expected --protocol {' or '.join(_HOLDS_FOR[name])}; leave "
                    "it out"
                )
            if name in _OF_WORKERS and self.scoring != "workers":
                raise ConfigError(
                    f"{option}: got {getattr(self, name)} under --protocol {self.protocol} without "
                    "--scoring workers, where it has no effect, expected both; add --scoring "
                    "workers or leave it out"
                )

    def check_exposure(self) -> None:
        """Refuse to be reachable from other machines without a token worth the name.

        Raises:
            ConfigError: If the address is not a loopback one and there is no token, or the token
                is short or cannot stand in a header.
        """
        secret = self.secret
        if secret is None and not _is_loopback(self.host):
            raise ConfigError(
                f"mrgym serve: got host {self.host!r} without a token, expected one for any "
                "address that other machines reach; set MRGYM_TOKEN or --token-file, or listen "
                "on 127.0.0.1"
            )
        if secret is not None and (
            len(secret) < _SHORTEST_TOKEN or not all("!" <= c <= "~" for c in secret)
        ):
            raise ConfigError(
                f"mrgym serve: got a token of {len(secret)} characters, expected at least "
                f"{_SHORTEST_TOKEN}, all of them printable ASCII without spaces; make one with "
                "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
