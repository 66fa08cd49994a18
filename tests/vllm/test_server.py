"""vLLM servers by URL: the same proofs as beside the trainer, and what may be wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import httpx
import pytest

from mrgym.errors import ConfigError, SamplerError
from mrgym.sampler import SamplingParams
from mrgym_trainers import GDPOConfig, GDPOTrainer
from mrgym_trainers.samplers.vllm.http import VLLMServer
from mrgym_trainers.samplers.vllm.server import VLLMServerSampler
from mrgym_trainers.samplers.vllm.settings import VLLMConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FLAGS = (
    "--dtype float32 --max-model-len 256 --enforce-eager --no-enable-chunked-prefill "
    "--logprobs-mode processed_logprobs --kv-cache-memory-bytes 268435456"
).split()
TRANSFER = ["--weight-transfer-config", '{"backend": "shared_memory"}']


class Server:
    """A vLLM server of the tiny policy in a process group of its own."""

    def __init__(self, model, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
            "--host", "127.0.0.1", "--port", str(self.port), *FLAGS, *TRANSFER,
        ]  # fmt: skip
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        self.process = subprocess.Popen(
            command, env=env, stdout=log, stderr=log, start_new_session=True
        )

    def wait(self):
        for _ in range(120):
            try:
                return httpx.get(f"{self.url}/health").raise_for_status()
            except httpx.HTTPError:
                assert self.process.poll() is None, "the server ended"
                time.sleep(1)
        raise AssertionError("the server did not come up")

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    log = (tmp_path_factory.mktemp("server") / "log.txt").open("w")
    server = Server(tiny, log)
    server.wait()
    yield server
    if server.process.poll() is None:
        server.kill()


@pytest.fixture
def settings(server):
    return partial(VLLMConfig, servers=(server.url,), start_timeout=5, retries=1)


@pytest.fixture
def rig(make_rig, settings):
    rig = make_rig(partial(VLLMServerSampler, config=settings()))
    yield rig
    rig.sampler.close()


def test_log_probabilities_are_the_policys_after_each_update(rig, prompts):
    for _ in range(3):
        rig.sync()
        assert rig.gap(prompts) < 1e-4
        rig.learn(prompts, lr=1e-3)
        assert rig.gap(prompts) > 1e-2
    rig.sync()
    assert rig.gap(prompts) < 1e-4


def test_seeds_ids_and_stops(rig, prompts):
    rig.sync()
    sample = partial(rig.sampler.sample, prompts, 4)
    one, same, other = (sample(SamplingParams(max_tokens=24, seed=s)) for s in (7, 7, 8))
    ids = [[[c.token_ids for c in group] for group in call] for call in (one, same, other)]
    assert ids[0] == ids[1] != ids[2]
    eos = rig.policy.tokenizer.eos_token_id
    for completion in (c for group in one for c in group):
        assert completion.stop_reason == ("stop" if completion.token_ids[-1] == eos else "length")


def test_weights_of_another_run_are_noticed(rig, make_rig, settings, prompts):
    rig.sync()
    intruder = make_rig(partial(VLLMServerSampler, config=settings()))
    intruder.version = 40
    intruder.sync()
    intruder.sampler.close()
    with pytest.raises(SamplerError, match="weights of version '41', expected 1"):
        rig.sampler.sample(prompts, 1, SamplingParams(max_tokens=4))


def test_servers_take_turns(rig, tiny, prompts, monkeypatch):
    rig.sync()
    asked = []
    (server,) = rig.sampler._servers
    other = VLLMServer(server.url, VLLMConfig())
    other.preflight(tiny, "float32")

    def noted(which, complete, body):
        asked.append(which)
        return complete(body)

    for each in (server, other):
        monkeypatch.setattr(each, "complete", partial(noted, each, each.complete))
    rig.sampler._servers = [server, other]
    assert rig.gap(prompts) < 1e-4
    assert asked.count(server) == asked.count(other) == len(prompts) // 2


def test_a_server_named_twice_is_refused(tiny, load, settings, server):
    both = settings(servers=(server.url, f"{server.url}/v1"))
    with pytest.raises(ConfigError, match="named twice"):
        VLLMServerSampler(tiny, load().tokenizer, [1], config=both)


def test_a_run_trains_through_a_server(server, tmp_path):
    vllm = {"servers": (server.url,), "start_timeout": 5}
    config = GDPOConfig(sampler="vllm", vllm=vllm, steps=2, eval_tasks=16, prompts_per_step=4)
    summary = GDPOTrainer("math_multi_reward", config, out=tmp_path / "run").train()
    assert (summary["status"], summary["steps"]) == ("finished", 2)


# --- what is wrong with a server is said before the first step -------------------------------


@pytest.mark.parametrize(
    ("keys", "model", "message"),
    [
        ({}, "some/other-model", "with the model .* expected 'some/other-model'; serve the policy"),
        ({"dtype": "bfloat16"}, None, "--dtype bfloat16"),
        ({"weight_transfer": "nccl"}, None, "weight transfer 'shared_memory', expected 'nccl'"),
    ],
    ids=["another model", "another precision", "another transfer"],
)
def test_a_server_that_does_not_fit_is_refused(tiny, load, settings, keys, model, message):
    dtype = keys.pop("dtype", "float32")
    with pytest.raises(SamplerError, match=message):
        VLLMServerSampler(
            model or tiny, load().tokenizer, [1], config=settings(**keys), dtype=dtype
        )


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_an_address_that_does_not_answer_is_refused(tiny, load, url):
    config = VLLMConfig(servers=(url,), start_timeout=0.1)
    with pytest.raises(SamplerError, match="check that the server is up and its address right"):
        VLLMServerSampler(tiny, load().tokenizer, [1], config=config)


def test_what_is_no_vllm_server_is_refused(tiny, load):
    import http.server
    import threading

    plain = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=plain.serve_forever, daemon=True).start()
    config = VLLMConfig(servers=(f"http://127.0.0.1:{plain.server_port}",), start_timeout=1)
    with pytest.raises(SamplerError, match=r"HTTP 404 .* check that the address is a vLLM server"):
        VLLMServerSampler(tiny, load().tokenizer, [1], config=config)
    plain.shutdown()


def test_nccl_needs_an_address():
    from mrgym_trainers.samplers.vllm.cuda_sender import NCCLSender

    with pytest.raises(ConfigError, match="nccl_address"):
        NCCLSender([], VLLMConfig(weight_transfer="nccl"), None)


def test_a_server_that_dies_while_sampling_is_one_clear_error(rig, prompts, server):
    """Last: it ends the server. No empty answers, and no wait without end in a sync either.

    Cases Tencent-Hunyuan/UniRL#214; awslabs/agentcore-rl-toolkit#122; huggingface/trl#6797; #3158.
    """
    rig.sync()
    stream = rig.sampler.stream(prompts * 8, 8, SamplingParams(max_tokens=200))
    next(stream)
    server.kill()
    with pytest.raises(SamplerError, match="its log says why it ended"):
        list(stream)
    with pytest.raises(SamplerError, match="expected an answer"):
        rig.sync()
