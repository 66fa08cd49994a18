"""What is wrong with a request, as a status and a structured answer."""

from __future__ import annotations

import gymnasium as gym

from mrgym.errors import MrgymError, RolloutError, SpaceError, TaskError
from mrgym.server.schemas import ErrorDetail, ErrorOut

__all__ = ["Problem", "problem_of"]


class Problem(Exception):  # noqa: N818 - it is an answer as much as an error
    """An answer that is an error.

    Args:
        status: HTTP status.
        type: Short name of the error, for machines.
        message: One line.
        subject: Part of the request it is about.
        retry_after: Seconds after which to ask again, where that helps.
        allow: Methods the path has, where another was used.
    """

    def __init__(
        self,
        status: int,
        type: str,
        message: str,
        *,
        subject: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
    ) -> None:
        # An environment's words may be no Unicode; an answer always is.
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.status = status
        self.type = type
        self.message = message
        self.subject = subject
        self.retry_after = retry_after
        self.allow = allow

    def answer(self, request_id: str) -> ErrorOut:
        """Return the body of the answer."""
        return ErrorOut(ErrorDetail(self.type, self.message, request_id, self.subject))

    def headers(self) -> dict[str, str]:
        """Return the headers it needs."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.allow is not None:
            headers["Allow"] = self.allow
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def problem_of(error: Exception, subject: str | None = None) -> Problem:
    """Return what an error of the environment means to the client.

    A task or text that does not fit is the request's fault (422), a step out of turn a conflict
    (409); whatever else an environment raises is its own (500).
    """
    if isinstance(error, Problem):
        return error
    name = type(error).__name__
    if isinstance(error, (TaskError, SpaceError, RolloutError)):
        return Problem(422, name, str(error), subject=subject)
    if isinstance(error, gym.error.ResetNeeded):
        return Problem(409, name, str(error), subject=subject)
    if isinstance(error, MrgymError):
        return Problem(500, name, str(error), subject=subject)
    problem = Problem(
        500,
        "EnvironmentError",
        f"environment: got {name}, expected none; the service's log has the details",
        subject=subject,
    )
    problem.__cause__ = error
    return problem
