"""The math environment's scores behind OpenEnv's server, by its documented interface alone.

Run with the Python of an environment that has openenv and mrgym:

    python benchmarks/service_peers/openenv_server.py
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import uvicorn
from openenv.core import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

import mrgym

ENV = mrgym.make("math_multi_reward")
TASKS = ENV.task_source("train")


class Said(Action):
    """A completion."""

    text: str = Field(description="What the policy said.")


class Asked(Observation):
    """A question, or the end of an episode."""

    text: str = Field(default="", description="The question.")


class MathEnvironment(Environment[Said, Asked, State]):
    """One question an episode; the components travel in the metadata."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._task = TASKS[0]
        self._steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Asked:
        """Ask the question with the number of the seed."""
        self._task = TASKS[(seed or 0) % len(TASKS)]
        self._steps = 0
        return Asked(text=ENV.plain_prompt(self._task), done=False, reward=None)

    def step(self, action: Said, timeout_s: float | None = None, **kwargs: Any) -> Asked:
        """Score the answer."""
        self._steps += 1
        (rollout,) = mrgym.score_completions(ENV, [self._task], [action.text])
        metadata = {"reward_components": rollout.components, "task_id": self._task.id}
        return Asked(done=True, reward=rollout.reward, metadata=metadata)

    @property
    def state(self) -> State:
        """Number of steps."""
        return State(step_count=self._steps)


def main() -> None:
    """Serve on a free port and print it."""
    app = create_fastapi_app(MathEnvironment, Said, Asked, max_concurrent_envs=256)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"serving at http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
