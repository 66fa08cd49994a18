"""How long, in time and bytes, the head of a request may be."""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any, Final

__all__ = ["patient_protocol"]

_LONGEST_HEAD: Final = 64 << 10


def patient_protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's fastest protocol here, which hangs up on heads that do not end.

    uvicorn waits for ever and reads without end: a few thousand such connections would use up all
    files, or one of them the memory. What comes after the head is the guard's concern.

    Args:
        seconds: Time for a head to arrive.
    """
    try:
        base: Any = import_module("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol
    except ModuleNotFoundError:
        base = import_module("uvicorn.protocols.http.h11_impl").H11Protocol
    return type("PatientProtocol", (_Patience, base), {"head_seconds": seconds})


class _Quiet:
    """A transport that drops what is written after its end.

    uvicorn tells only the last of several requests of a connection that their client has gone.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


class _Patience(asyncio.Protocol):
    """Stands before a protocol of uvicorn's, whose attributes are named here."""

    head_seconds: float
    cycle: Any
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    _alarm: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _upgraded = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(_Quiet(transport))  # type: ignore[arg-type]
        self._expect_head(0)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_head(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, *args: Any) -> None:
        self._upgraded = True
        super().handle_websocket_upgrade(*args)  # type: ignore[misc]

    def _expect_head(self, received: int) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if self._upgraded or not idle:
            self._calm()
            return
        self._head_bytes += received
        if self._head_bytes > _LONGEST_HEAD:
            self.transport.close()
        elif self._alarm is None:
            self._alarm = self.loop.call_later(self.head_seconds, self.transport.close)

    def _calm(self) -> None:
        self._head_bytes = 0
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
