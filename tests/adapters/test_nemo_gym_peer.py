"""NeMo Gym's own agent, converter, models and metrics against our resources server."""

import asyncio
import json
import random

import pytest

pytest.importorskip("nemo_gym", reason="needs nemo-gym on Python 3.12 (make test-peers)")
import uvicorn
from fastapi import FastAPI
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import (
    AggregateMetrics,
    BaseServerConfig,
    ModelServerRef,
    ResourcesServerRef,
)
from nemo_gym.global_config import GlobalConfigDictParser
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.responses_converter import ResponsesConverter
from nemo_gym.reward_profile import compute_aggregate_metrics
from nemo_gym.server_utils import ServerClient, get_global_aiohttp_client
from omegaconf import OmegaConf
from pydantic import ConfigDict
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

import mrgym
from mrgym.adapters import nemo_gym
from mrgym.adapters._nemo_gym_metrics import aggregate
from mrgym.adapters._nemo_gym_response import response_of

AGENT = "agent"


@pytest.fixture(scope="module", autouse=True)
def _no_configuration_of_its_own():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEMO_GYM_CONFIG_DICT", "{}")
        yield


def model_of(completions):
    """A model server that says what the test wants, as NeMo Gym's vLLM server would give it."""
    model = FastAPI()
    converter = ResponsesConverter(return_token_id_information=False)

    @model.post("/v1/responses")
    def answer(body: dict):
        text = completions[int(body["metadata"]["n"])]
        message = {"role": "assistant", "content": text}
        output = converter.postprocess_assistant_message_dict(message)
        response = response_of(mrgym.Completion(""))
        return {**response, "output": [item.model_dump() for item in output]}

    return model


async def serve(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    return server, task, server.servers[0].sockets[0].getsockname()[1]


def at(kind, name, port):
    return {kind: {name: {"host": "127.0.0.1", "port": port}}}


async def played(env, rows, completions):
    """Return what NeMo Gym's simple agent makes of rows: status and body of each /run."""
    model, served = await serve(model_of(completions)), await serve(nemo_gym.create_app(env))
    config = OmegaConf.create(
        {
            "policy_model": at("responses_api_models", "vllm_model", model[2]),
            "mrgym": at("resources_servers", "mrgym", served[2]),
        }
    )
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=config
    )
    agent = SimpleAgent(
        config=SimpleAgentConfig(
            name=AGENT,
            host="127.0.0.1",
            port=1,
            entrypoint="app.py",
            resources_server=ResourcesServerRef(type="resources_servers", name="mrgym"),
            model_server=ModelServerRef(type="responses_api_models", name="policy_model"),
        ),
        server_client=client,
    )
    app = agent.setup_webserver()
    agent.setup_exception_middleware(app)
    acting = await serve(app)
    config[AGENT] = OmegaConf.create(at("responses_api_agents", "simple_agent", acting[2]))

    async def run(row):
        reply = await client.post(AGENT, "/run", json=row)
        return reply.status, await reply.json()

    results = await asyncio.gather(*map(run, rows))
    bodies = [body for status, body in results if status == 200]
    metrics = await client.post(
        AGENT, "/aggregate_metrics", json={"verify_responses": stripped(bodies)}
    )
    overall = await metrics.json()
    await get_global_aiohttp_client().close()
    for server, task, _ in (model, served, acting):
        server.should_exit = True
        await task
    return results, overall


def stripped(bodies):
    return [
        {k: v for k, v in body.items() if k not in ("response", "responses_create_params")}
        for body in bodies
    ]


@pytest.fixture(scope="module")
def run(sample):
    by_id = {row["verifier_metadata"]["task_id"]: row for row in nemo_gym.rows(sample.env)}
    rows = [
        {
            "responses_create_params": by_id[task.id]["responses_create_params"]
            | {"metadata": {"n": str(n)}},
            "verifier_metadata": by_id[task.id]["verifier_metadata"],
            "_ng_task_index": n % 20,
            "_ng_rollout_index": n // 20,
        }
        for n, task in enumerate(sample.tasks)
    ]
    unknown = {**rows[0], "verifier_metadata": {"task_id": "nobody", "split": "train"}}
    results, metrics = asyncio.run(played(sample.env, [*rows, unknown], sample.completions))
    return results[:-1], results[-1], metrics


def test_the_sample_through_its_agent_has_our_components(sample, run):
    results, _, _ = run
    assert [status for status, _ in results] == [200] * len(sample.components)
    for (_, body), expected in zip(results, sample.components, strict=True):
        assert body["reward_components"] == expected
        assert {name: body[name] for name in expected} == expected
        assert body["reward"] == sum(expected.values())


def test_its_models_take_our_answers(run):
    for _, body in run[0]:
        BaseVerifyRequest.model_validate(body)
        assert BaseVerifyResponse.model_validate(body).reward == body["reward"]


def test_a_row_it_cannot_score_ends_the_rollout_at_once(run):
    status, body = run[1]
    assert status == 500
    assert "nobody" in body


def test_metrics_come_through_its_agent(sample, run):
    _, _, metrics = run
    AggregateMetrics.model_validate(metrics)
    for name in sample.components[0]:
        mean = sum(c[name] for c in sample.components) / len(sample.components)
        assert metrics["key_metrics"][f"mean/{name}"] == pytest.approx(mean, rel=1e-12)


def metrics_cases():
    draw = random.Random(0)
    usage = {"usage": {"input_tokens": 3, "output_tokens": 5, "total_tokens": 8}}
    for tasks, rollouts in ((1, 1), (1, 3), (3, 1), (4, 5)):
        yield [
            {"_ng_task_index": t, "_ng_rollout_index": r, "reward": draw.random()}
            | {"correct": draw.random(), "solved": draw.random() > 0.5, "note": "x"}
            | ({"response": usage} if draw.random() > 0.3 else {})
            for t in range(tasks)
            for r in range(rollouts)
        ]


@pytest.mark.parametrize("responses", [*metrics_cases()])
def test_metrics_equal_its_own(responses):
    ours, its = aggregate(responses), compute_aggregate_metrics(responses)
    assert ours["agent_metrics"] == pytest.approx(its.agent_metrics, rel=1e-9, abs=1e-12)
    assert ours["key_metrics"] == pytest.approx(its.key_metrics, rel=1e-9, abs=1e-12)
    for mine, group in zip(ours["group_level_metrics"], its.group_level_metrics, strict=True):
        statistics = {k: v for k, v in group.items() if "/" in k}
        assert {k: v for k, v in mine.items() if "/" in k} == pytest.approx(
            statistics, rel=1e-9, abs=1e-12
        )
        assert mine["_ng_task_index"] == group["_ng_task_index"]


def test_it_drops_a_component_from_means_where_it_is_missing():
    """Its metrics skip a missing number; NeMo RL's 0.0 for it is why abstention is refused."""
    responses = [{"_ng_task_index": 0, "_ng_rollout_index": r, "reward": 0} for r in range(2)]
    responses[0]["seen"] = 1.0
    assert compute_aggregate_metrics(responses).agent_metrics["mean/seen"] == 1.0


@pytest.mark.parametrize("stop_reason", ["stop", "length"])
def test_its_models_take_our_responses(stop_reason):
    response = response_of(mrgym.Completion("hello", stop_reason=stop_reason))
    read = NeMoGymResponse.model_validate(response)
    assert read.output_text == "hello"
    assert (read.incomplete_details is not None) == (stop_reason == "length")


class Row(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


class Verified(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


class Graded(SimpleResourcesServer):
    """A resources server of its own make that has our scores."""

    async def verify(self, body: Row) -> Verified:
        row = body.model_dump()
        assert row["verifier_metadata"]["n"] in range(200)
        components = EXPECTED[row["verifier_metadata"]["n"]]
        SAID.append(body.response.output_text)
        return Verified(**row, reward=sum(components.values()), reward_components=components)


EXPECTED, SAID = [], []


def test_a_server_of_its_own_scores_as_an_environment(sample):
    EXPECTED.extend(sample.components)
    rows = [
        {"responses_create_params": {"input": f"task {n}"}, "verifier_metadata": {"n": n}}
        for n in range(200)
    ]
    config = BaseResourcesServerConfig(
        name="graded", host="127.0.0.1", port=1, entrypoint="app.py", domain="math"
    )
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({}),
    )

    async def scored():
        server, task, port = await serve(
            Graded(config=config, server_client=client).setup_webserver()
        )
        env = nemo_gym.from_nemo_gym(
            f"http://127.0.0.1:{port}",
            components=sample.env.components,
            tasks=rows,
            eval_tasks=[{"responses_create_params": {"input": "other"}}],
        )
        got = await asyncio.to_thread(
            mrgym.score_completions, env, [*env.task_source("train")], sample.completions
        )
        server.should_exit = True
        await task
        return got

    assert [r.components for r in asyncio.run(scored())] == sample.components
    assert sorted(SAID) == sorted(sample.completions)


def test_its_parser_takes_the_configuration_in_the_docs():
    config = OmegaConf.create(
        {
            "mrgym": {
                "resources_servers": {
                    "mrgym": {
                        "entrypoint": "app.py",
                        "domain": "math",
                        "host": "127.0.0.1",
                        "port": 8000,
                    }
                }
            },
            "mrgym_agent": {
                "responses_api_agents": {
                    "simple_agent": {
                        "entrypoint": "app.py",
                        "resources_server": {"type": "resources_servers", "name": "mrgym"},
                    }
                }
            },
        }
    )
    parser = GlobalConfigDictParser()
    servers = parser.filter_for_server_instance_configs(config)
    assert [server.name for server in servers] == ["mrgym", "mrgym_agent"]
    parser.validate_and_populate_defaults(servers, "127.0.0.1", 10_000, 20_000)
    inner = json.loads(json.dumps(OmegaConf.to_container(config)))
    assert inner["mrgym"]["resources_servers"]["mrgym"]["port"] == 8000
