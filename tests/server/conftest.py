"""Real services on ephemeral ports, and environments to serve."""

from __future__ import annotations

import threading
import time

import gymnasium as gym
import httpx
import numpy as np
import pytest

import mrgym
from mrgym.server import ServerConfig

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from mrgym.server.serve import Service, build_app, listen


class Running:
    """A service in a thread of this process."""

    def __init__(self, env, **settings):
        config = ServerConfig(port=0, **settings)
        app, switch = build_app(env, config)
        listener = listen(config)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.app = app
        self.service = Service(app, switch, config)
        self.thread = threading.Thread(
            target=self.service.run, kwargs={"sockets": [listener]}, daemon=True
        )
        self.thread.start()
        headers = {"Authorization": f"Bearer {config.secret}"} if config.secret else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False)

    def metric(self, start):
        """Return the sum of the samples whose line starts so."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))

    def stop(self):
        self.http.close()
        self.service.handle_exit(15, None)
        self.thread.join(20)
        assert not self.thread.is_alive()


def _serving():
    running = []

    def serve(env, **settings):
        running.append(Running(env, **settings))
        return running[-1]

    yield serve
    for service in running:
        service.stop()


@pytest.fixture
def serving():
    """A function that serves an environment until the test is over."""
    yield from _serving()


@pytest.fixture(scope="module")
def module_serving():
    """The same until the module's tests are over."""
    yield from _serving()


@pytest.fixture(scope="module")
def math_service(module_serving):
    return module_serving(mrgym.make("math_multi_reward"))


class Counter(mrgym.MultiRewardEnv):
    """Counts its steps; the action is added to the reward. Closes aloud."""

    components = mrgym.components(
        moved=mrgym.Component(low=-1, high=1),
        tired=mrgym.Component(low=-10, high=0, optional=True),
    )
    closed = 0
    steps_of_all = 0

    def __init__(self, pause=0.0, length=5):
        self.observation_space = gym.spaces.Dict(
            {
                "where": gym.spaces.Box(-np.inf, np.inf, (2, 2), np.float32),
                "turn": gym.spaces.Discrete(100),
                "flags": gym.spaces.MultiBinary(3),
                "pair": gym.spaces.Tuple(
                    [gym.spaces.Box(0, 255, (3,), np.uint8), gym.spaces.MultiDiscrete([5, 6])]
                ),
            }
        )
        self.action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        self.pause, self.length = pause, length

    def _look(self):
        return {
            "where": self.where,
            "turn": np.int64(self.turn),
            "flags": np.array([1, 0, self.turn % 2], np.int8),
            "pair": (np.array([self.turn, 0, 255], np.uint8), np.array([1, self.turn % 6])),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        self.where = self.np_random.normal(size=(2, 2)).astype(np.float32)
        return self._look(), {"options": options or {}, "odd": object()}

    def step(self, action):
        time.sleep(self.pause)
        type(self).steps_of_all += 1
        self.turn += 1
        self.where = self.where + action
        scores = {
            "moved": float(np.clip(action[0], -1, 1)),
            "tired": mrgym.ABSENT if self.turn % 2 else -self.turn / 3,
        }
        return self.emit(self._look(), scores, terminated=self.turn >= self.length)

    def close(self):
        type(self).closed += 1


@pytest.fixture
def counter_class():
    """A fresh class, so that no test counts another's steps."""
    return type("Counter", (Counter,), {"closed": 0, "steps_of_all": 0})
