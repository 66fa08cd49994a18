"""OpenEnv, over real sockets: our server with its clients, and its servers as environments."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import httpx
import numpy as np
import pytest

import mrgym
from mrgym import Component

pytest.importorskip("openenv", reason="needs openenv (make test-peers)")

import uvicorn
from openenv.core import Action, EnvClient, Environment, GenericEnvClient, Observation, State
from openenv.core import create_fastapi_app as their_app
from openenv.core.client_types import StepResult

from mrgym.adapters.openenv import create_app, from_openenv, models


@contextlib.contextmanager
def serving(app):
    """The address of an application that runs in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws_max_size=2**24))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def url(sample):
    with serving(create_app(sample.env)) as address:
        yield address


TextAction, TextObservation = models(mrgym.make("math_multi_reward"))


class MathClient(EnvClient[TextAction, TextObservation, State]):
    """A client as OpenEnv's docs have it: typed on both sides."""

    def _step_payload(self, action):
        return action.model_dump()

    def _parse_result(self, payload):
        observation = TextObservation(
            **payload["observation"], reward=payload["reward"], done=payload["done"]
        )
        return StepResult(observation, payload["reward"], payload["done"])

    def _parse_state(self, payload):
        return State(**payload)


class Grid(mrgym.MultiRewardEnv):
    """Any spaces, gates, an abstention, and failures on demand."""

    components = mrgym.components(
        near=Component(low=0, high=1),
        bonus=Component(low=0, high=5, gate=mrgym.Gate(on="near", at_least=0.5)),
        rare=Component(low=0, high=1, optional=True),
    )
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(6)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.closed = False
        return np.array([0.1, -0.5], np.float32), {"options": options, "object": object()}

    def step(self, action):
        self.steps += 1
        if action == 4:
            raise ValueError("no such cell")
        scores = {"near": action / 4, "bonus": 9 if action == 5 else 3, "rare": mrgym.ABSENT}
        return self.emit(
            np.array([action / 5, self.steps / 10], np.float32),
            {**scores, "rare": 1.0} if action == 3 else scores,
            terminated=action == 2,
            truncated=self.steps == 3,
            info={"when": np.float64(0.5), "odd": float("nan")},
        )


class Talk(mrgym.MultiTurnEnv):
    """Three turns; scores whose range holds no 0."""

    max_turns = 3

    def tasks(self):
        return [mrgym.Task(prompt=p) for p in "abc"]

    def respond(self, state, completion):
        return f"you said {completion}" if state.turn < 3 else None

    @mrgym.component(low=1, high=2, reduce="mean")
    def length(self, task, completion):
        return len(completion)

    @mrgym.component(low=1, reduce="sum")
    def turns(self, task, completion):
        return 1


@pytest.fixture(scope="module")
def grid():
    with serving(create_app(Grid, max_concurrent_envs=2)) as address:
        yield address


@pytest.fixture
def client(grid):
    with GenericEnvClient(grid).sync() as session:
        yield session


class TestServed:
    def test_components_of_the_sample_are_the_same(self, url, sample):
        with MathClient(url).sync() as client:
            for task, text, expected in zip(
                sample.tasks, sample.completions, sample.components, strict=True
            ):
                first = client.reset(task_id=task.id)
                assert first.observation.text == sample.env.plain_prompt(task)
                assert first.reward is None
                result = client.step(TextAction(text=text))
                metadata = result.observation.metadata
                assert metadata["reward_components"] == expected
                assert [*metadata["reward_components"]] == [*expected]
                assert result.reward == sum(expected.values())
                assert (result.done, metadata["terminated"], metadata["truncated"]) == (
                    *(True, True, False),
                )

    def test_the_same_seed_gives_the_same_task(self, url):
        with GenericEnvClient(url).sync() as client:
            seen = [client.reset(seed=seed).metadata["task_id"] for seed in (3, 4, 3)]
            assert seen[0] == seen[2] != seen[1]

    def test_tasks_are_found_by_split_and_index_and_keep_their_answers(self, url, sample):
        name = sample.env.contract_name
        body = {"split": "eval", "index": 2}
        task = httpx.post(f"{url}/{name}/task", json=body).json()
        expected = sample.env.task_source("eval")[2]
        assert expected.id in str(task)
        assert expected.answer not in task.values()
        with GenericEnvClient(url).sync() as client:
            assert client.reset(**body).metadata["task_id"] == expected.id
            with pytest.raises(RuntimeError, match=r"got index 99999, expected 0 to 511"):
                client.reset(split="eval", index=99999)
        count = httpx.post(f"{url}/{name}/num_tasks", json={"split": "eval"})
        assert count.json() == {"num_tasks": 512}

    def test_an_unknown_reset_option_is_refused(self, url):
        with (
            GenericEnvClient(url).sync() as client,
            pytest.raises(RuntimeError, match="did you mean 'task_id'"),
        ):
            client.reset(taskid="x")

    def test_an_index_beside_an_id_is_refused(self, url, sample):
        other = sample.env.task_source("train")[1].id
        with GenericEnvClient(url).sync() as client:
            with pytest.raises(RuntimeError, match="'index' or 'task_id'"):
                client.reset(index=0, task_id=other)
            with pytest.raises(RuntimeError, match="got index True"):
                client.reset(index=True)

    def test_one_environment_for_all_sessions_is_refused(self):
        env = mrgym.make("math_multi_reward")
        with pytest.raises(mrgym.ConfigError, match="gives the same math_multi_reward"):
            create_app(lambda: env)

    def test_sessions_draw_tasks_of_their_own(self):
        env = mrgym.make("math_multi_reward")
        env.reset(seed=0)
        seen = []
        with serving(create_app(env)) as address:
            for _ in range(2):
                with GenericEnvClient(address).sync() as client:
                    seen.append([client.reset().metadata["task_id"] for _ in range(4)])
        assert seen[0] != seen[1]

    def test_sessions_do_not_share_an_episode(self, url, sample):
        one, two = sample.env.task_source("train")[:2]
        with GenericEnvClient(url).sync() as a, GenericEnvClient(url).sync() as b:
            a.reset(task_id=one.id)
            b.reset(task_id=two.id)
            gold = [sample.env.gold_completion(task) for task in (one, two)]
            marks = [c.step({"text": g}).reward for c, g in zip((a, b), gold, strict=True)]
            assert marks == [3.0, 3.0]

    def test_sessions_at_a_time_score_the_same(self, url, sample):
        def score(part):
            with GenericEnvClient(url).sync() as client:
                out = []
                for i in range(part, 200, 8):
                    client.reset(task_id=sample.tasks[i].id)
                    metadata = client.step({"text": sample.completions[i]}).metadata
                    out.append((i, metadata["reward_components"]))
                return out

        with ThreadPoolExecutor(8) as pool:
            found = dict(pair for part in pool.map(score, range(8)) for pair in part)
        assert [found[i] for i in range(200)] == sample.components

    def test_turns_and_their_ranges_on_both_sides(self):
        with serving(create_app(Talk)) as address:
            env, local = from_openenv(address, components=Talk.components), Talk()
            assert env.reset(seed=1) == local.reset(seed=1)
            for text in ("x", "yy", "z"):
                assert env.step(text) == local.step(text)
            env.close()

    def test_a_session_that_was_lost_asks_for_a_reset(self, url):
        env = remote(url)
        env.reset(seed=0)
        env._client.disconnect()
        with pytest.raises(mrgym.ScoreError, match="expected a reset first"):
            env.step("x")
        env.close()

    def test_half_a_surrogate_pair_is_scored_and_never_answered(self, url, sample):
        text = "\ud800<answer>3</answer>"
        task = sample.tasks[0]
        expected = mrgym.score_completions(sample.env, [task], [text])[0].components
        with GenericEnvClient(url).sync() as client:
            client.reset(task_id=task.id)
            assert client.step({"text": text}).metadata["reward_components"] == expected
        with serving(create_app(Talk)) as address, GenericEnvClient(address).sync() as client:
            client.reset()
            with pytest.raises(RuntimeError, match="expected finite numbers and Unicode"):
                client.step({"text": "\ud800"})
            with pytest.raises(RuntimeError, match="expected a reset first"):
                client.step({"text": "x"})

    def test_what_is_no_text_is_refused(self, url):
        with GenericEnvClient(url).sync() as client:
            client.reset(seed=0)
            for wrong in ({"text": 3}, {"value": "x"}, {}):
                with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
                    client.step(wrong)
            assert client.step({"text": ""}).done

    def test_schema_and_metadata_name_the_environment(self, url):
        schema = httpx.get(f"{url}/schema").json()
        assert schema["action"]["properties"]["text"]["type"] == "string"
        assert "math_multi_reward" in httpx.get(f"{url}/metadata").json()["name"]

    def test_a_step_without_a_session_is_refused_with_its_reason(self, url):
        answer = httpx.post(f"{url}/step", json={"action": {"text": "x"}})
        assert answer.status_code == 400
        assert "use /ws" in answer.json()["error"]["message"]

    def test_values_gates_and_abstentions(self, client):
        first = client.reset(seed=1, level=2)
        assert first.observation["value"] == [float(np.float32(0.1)), -0.5]
        assert first.metadata == {"options": {"level": 2}, "info_left_out": ["object"]}
        shut = client.step({"value": 1})
        assert shut.reward == 0.25
        assert shut.metadata["reward_components"] == {"near": 0.25, "bonus": 0.0}
        assert shut.metadata["raw_components"] == {"near": 0.25, "bonus": 3.0}
        assert (shut.metadata["when"], shut.metadata["info_left_out"]) == (0.5, ["odd"])
        there = client.step({"value": 3}).metadata
        assert there["reward_components"] == {"near": 0.75, "bonus": 3.0, "rare": 1.0}
        assert not there["truncated"]
        cut = client.step({"value": 0})
        assert (cut.done, cut.metadata["terminated"], cut.metadata["truncated"]) == (
            *(True, False, True),
        )
        assert client.state()["step_count"] == 3

    @pytest.mark.parametrize("wrong", [6, -1, 1.5, "1", None, [1], {"a": 1}])
    def test_actions_outside_the_space_are_refused_and_the_episode_goes_on(self, client, wrong):
        client.reset()
        with pytest.raises(RuntimeError, match=r"expected a value of Discrete\(6\)"):
            client.step({"value": wrong})
        assert client.step({"value": 2}).metadata["terminated"]

    @pytest.mark.parametrize(
        ("action", "message"),
        [(4, "no such cell"), (5, r"got near=1\.25, expected within")],
    )
    def test_failures_reach_the_client_and_end_the_episode(self, client, action, message):
        client.reset()
        with pytest.raises(RuntimeError, match=message):
            client.step({"value": action})
        with pytest.raises(RuntimeError, match="expected a reset first"):
            client.step({"value": 1})
        client.reset()
        assert client.step({"value": 1}).reward == 0.25

    def test_capacity_is_kept_and_given_back(self, grid):
        with GenericEnvClient(grid).sync() as one, GenericEnvClient(grid).sync() as two:
            one.reset()
            two.reset()
            with GenericEnvClient(grid).sync() as three, pytest.raises(RuntimeError, match="CAPAC"):
                three.reset()
        with GenericEnvClient(grid).sync() as again:
            assert again.reset().done is False

    def test_a_score_function_that_raises_is_an_error(self):
        class Broken(mrgym.SingleTurnEnv):
            def tasks(self):
                return [mrgym.Task(prompt=p) for p in "ab"]

            @mrgym.component(low=0, high=1)
            def fine(self, task, completion):
                return 1 / len(completion)

        with serving(create_app(Broken())) as address, GenericEnvClient(address).sync() as client:
            client.reset()
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                client.step({"text": ""})
            with pytest.raises(RuntimeError, match="expected a reset first"):
                client.step({"text": "x"})

    def test_what_json_cannot_carry_is_refused_when_the_app_is_made(self):
        class Graphs(Grid):
            observation_space = gym.spaces.Graph(gym.spaces.Discrete(2), None)

        with pytest.raises(mrgym.errors.SpaceError, match="OpenEnv: got Graph"):
            create_app(Graphs)

    def test_an_environment_that_cannot_be_copied_is_refused_when_the_app_is_made(self):
        env = Grid()
        env.lock = threading.Lock()
        with pytest.raises(mrgym.ConfigError, match="give a function that makes one"):
            create_app(env)

    @pytest.mark.parametrize("wrong", [3, lambda: gym.make("CartPole-v1")])
    def test_what_is_no_environment_is_refused_when_the_app_is_made(self, wrong):
        with pytest.raises(mrgym.ConfigError, match="expected a MultiRewardEnv"):
            create_app(wrong)


def remote(address, **options):
    return from_openenv(address, components=mrgym.make("math_multi_reward").components, **options)


class TestRemote:
    def test_components_of_the_sample_are_the_same(self, url, sample):
        env = remote(url)
        for task, text, expected in zip(
            sample.tasks, sample.completions, sample.components, strict=True
        ):
            prompt, info = env.reset(options={"task_id": task.id})
            assert (prompt, info["task_id"]) == (sample.env.plain_prompt(task), task.id)
            _, reward, terminated, truncated, info = env.step(text)
            assert info["reward_components"] == expected
            assert (reward, terminated, truncated) == (sum(expected.values()), True, False)
        env.close()

    def test_it_passes_the_check(self, url):
        report = mrgym.check_env(remote(url))
        assert report.ok, str(report)

    def test_copies_have_sessions_of_their_own(self, url):
        env = remote(url)
        env.reset(seed=0)
        for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
            assert other.reset(seed=0) == env.reset(seed=0)
            other.close()
        env.close()

    def test_spaces_gates_and_abstentions(self, grid):
        env = from_openenv(
            grid,
            components=Grid.components,
            action_space=Grid.action_space,
            observation_space=Grid.observation_space,
        )
        local = Grid()
        ours, theirs = env.reset(seed=2), local.reset(seed=2)
        assert ours[0].dtype == np.float32
        assert (ours[0] == theirs[0]).all()
        for action in (1, 3, 0):
            (o, r, te, tr, info), expected = env.step(action), local.step(action)
            assert (o == expected[0]).all()
            assert (r, te, tr) == expected[1:4]
            for key in ("reward_components", "raw_components"):
                assert info[key] == expected[4][key]
        env.reset()
        with pytest.raises(mrgym.ScoreError, match="no such cell"):
            env.step(4)
        env.close()

    def test_an_action_that_is_no_text_is_refused_here(self, url):
        env = remote(url)
        with pytest.raises(gym.error.ResetNeeded):
            env.step("x")
        env.reset(seed=0)
        with pytest.raises(mrgym.errors.SpaceError, match="got action 3, expected text"):
            env.step(3)
        env.close()

    def test_a_client_may_be_given(self, url):
        with GenericEnvClient(url) as client:
            env = remote(client)
            env.reset(seed=0)
            assert env.step("")[4]["reward_components"]["format"] == 0.0

    def test_what_is_neither_address_nor_client_is_refused(self):
        with pytest.raises(mrgym.ConfigError, match="got int"):
            remote(3)

    def test_no_server_is_an_error(self):
        with pytest.raises(ConnectionError):
            remote("http://127.0.0.1:9").reset()


class Said(Observation):
    """What a server of somebody else's answers."""

    text: str = "hm"


class Foreign(Environment[Action, Said, State]):
    """A server that answers what its client's metadata ask for."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Said(done=kwargs.get("done", False))

    def step(self, action, timeout_s=None, **kwargs):
        return Said(**action.metadata)

    @property
    def state(self):
        return State()


GOOD = {"a": 1.0, "b": 0.5}
ENDED = {"terminated": True, "truncated": False}


def answer(values=GOOD, *, reward=1.5, done=True, **metadata):
    if values is not None:
        metadata["reward_components"] = values
    return {"reward": reward, "done": done, "metadata": metadata}


@pytest.fixture(scope="module")
def address():
    with serving(their_app(Foreign, Action, Said, max_concurrent_envs=8)) as found:
        yield found


class TestForeignServers:
    def told(self, address, said, **options):
        env = from_openenv(
            address,
            components={
                "a": Component(low=0, high=1),
                "b": Component(),
                "c": Component(optional=True),
            },
            encode=lambda action: {"metadata": action},
            **options,
        )
        try:
            env.reset()
            return env.step(said)
        finally:
            env.close()

    def test_a_good_answer_passes(self, address):
        said = self.told(address, answer(**ENDED))
        assert said == ("hm", 1.5, True, False, {"reward_components": GOOD})
        cut = self.told(address, answer(terminated=False, truncated=True))
        assert cut[2:4] == (False, True)

    @pytest.mark.parametrize(
        ("said", "message"),
        [
            (answer(None, **ENDED), "the server drops them"),
            ({"reward": 1.5, "done": True}, "the server drops them"),
            (answer([1.0, 0.5], **ENDED), "the server drops them"),
            (answer({"a": 1.0}, **ENDED), r"missing \['b'\]"),
            (answer({**GOOD, "d": 0.0}, **ENDED), r"unknown \['d'\]"),
            (answer({**GOOD, "b": None}, **ENDED), "got b=None"),
            (answer({**GOOD, "b": "0.5"}, **ENDED), "expected one real number"),
            (answer({**GOOD, "a": 2.0}, **ENDED), r"expected within the declared \[0, 1\]"),
            (answer(reward=None, **ENDED), "got reward=None, expected 1.5"),
            (answer(reward=1.4, **ENDED), "got reward=1.4, expected 1.5"),
            (answer(), "say what done means"),
            (answer(terminated=True), "truncated=None"),
            (answer(terminated="yes", truncated=False), "terminated='yes'"),
            (answer(done=False, **ENDED), "got done=False"),
            (answer(terminated=False, truncated=False), "got done=True"),
        ],
    )
    def test_anything_else_is_refused(self, address, said, message):
        with pytest.raises(mrgym.RewardContractError, match=message):
            self.told(address, said)

    @pytest.mark.parametrize(("means", "ended"), [("terminated", (1, 0)), ("truncated", (0, 1))])
    def test_what_done_means_can_be_said(self, address, means, ended):
        assert self.told(address, answer(), done_means=means)[2:4] == ended
        assert self.told(address, answer(done=False), done_means=means)[2:4] == (False, False)

    def test_an_episode_that_is_over_at_reset_is_refused(self, address):
        env = from_openenv(address, components={"a": Component()})
        with pytest.raises(mrgym.RewardContractError, match="done=True from reset"):
            env.reset(options={"done": True})
        env.close()

    def test_an_observation_without_the_field_is_refused_with_the_remedy(self, address):
        env = from_openenv(
            address, components={"a": Component()}, observation_space=gym.spaces.Discrete(2)
        )
        with pytest.raises(mrgym.errors.SpaceError, match=r"field 'value'; pass decode="):
            env.reset()
        env.close()
