"""One vLLM server: its routes, with finite timeouts and errors that say what is wrong with it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from mrgym.errors import SamplerError
from mrgym_trainers.samplers.vllm.settings import VLLMConfig

__all__ = ["VLLMServer"]

_RLHF = "start it with VLLM_SERVER_DEV_MODE=1"


class VLLMServer:
    """A server's routes for completions and for weight syncs.

    Args:
        url: Base URL, with or without ``/v1``.
        config: Timeouts, retries and the kind of weight transfer.
    """

    def __init__(self, url: str, config: VLLMConfig) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._config = config
        self._model = ""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.Client(base_url=self.url, limits=limits, timeout=10.0)

    def preflight(self, model: str, dtype: str) -> int:
        """Return the server's context length, having made sure that it can serve this policy.

        Args:
            model: What the policy was loaded from.
            dtype: What the server must compute in.

        Raises:
            SamplerError: If it does not answer within ``start_timeout`` or serves something else.
        """
        served = self._wait()["data"][0]
        self._model = served["id"]
        info = self._json(
            "GET", "server_info", params={"config_format": "json"}, remedy=_RLHF, timeout=60.0
        )
        started = info["vllm_config"]
        self._check_started(started, model, dtype)
        return int(served["max_model_len"])

    def complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the choices of one completion request."""
        answer = self._json(
            "POST",
            "v1/completions",
            json={"model": self._model, **body},
            timeout=self._config.request_timeout,
            retries=self._config.retries,
        )
        choices: list[dict[str, Any]] = answer["choices"]
        return choices

    def check_version(self, version: int) -> None:
        """Make sure that the server still has the weights it was sent.

        Raises:
            SamplerError: If it has others, as after a restart.
        """
        found = self._json("GET", "weight_info", remedy=_RLHF)["weight_version"]
        if found != str(version):
            raise SamplerError(
                f"{self.url}: got weights of version {found!r}, expected {version}: the server was "
                "restarted or is used by another run; give every run servers of its own"
            )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepare a transfer that needs to be agreed on."""
        self._sync("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin."""
        self._sync("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load some tensors."""
        self._sync("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End; from here on completions are of this version."""
        self._sync("finish_weight_update", {"weight_version": weight_version})

    def set_version(self, version: int) -> None:
        """Name the weights the server has, where the transfer did not."""
        self._sync("update_weight_version", {"new_version": str(version)})

    def reset_prefix_cache(self) -> None:
        """Forget what was computed with the weights before."""
        self._sync("reset_prefix_cache", None)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _sync(self, path: str, body: dict[str, Any] | None) -> None:
        timeout = self._config.sync_timeout
        self._send("POST", path, json=body, timeout=timeout, remedy=_RLHF, retries=0)

    def _wait(self) -> Any:
        """Return what ``/v1/models`` says, once the server is up."""
        end = time.monotonic() + self._config.start_timeout
        while True:
            try:
                return self._json("GET", "v1/models")
            except SamplerError as error:
                refused = isinstance(error.__cause__, httpx.TransportError)
                if not refused:
                    raise
                if time.monotonic() > end:
                    limit = self._config.start_timeout
                    raise SamplerError(
                        f"{error} (tried for {limit:g} s, vllm.start_timeout)"
                    ) from error
                time.sleep(1.0)

    def _check_started(self, started: dict[str, Any], model: str, dtype: str) -> None:
        config = started["model_config"]
        transfer = (started.get("weight_transfer_config") or {}).get("backend")
        backend = self._config.weight_transfer
        if not _same_model(config["model"], model):
            self._refuse(f"the model {config['model']!r}", repr(model), "serve the policy's model")
        if config["dtype"].removeprefix("torch.") != dtype:
            self._refuse(f"dtype {config['dtype']}", dtype, f"start it with --dtype {dtype}")
        if config["logprobs_mode"] != "processed_logprobs":
            mode = "--logprobs-mode processed_logprobs"
            self._refuse(config["logprobs_mode"], "log-probabilities after temperature", mode)
        if transfer != backend:
            flag = f'--weight-transfer-config \'{{"backend": "{backend}"}}\''
            self._refuse(f"weight transfer {transfer!r}", repr(backend), f"start it with {flag}")

    def _refuse(self, got: str, expected: str, remedy: str) -> None:
        raise SamplerError(f"{self.url}: got a server with {got}, expected {expected}; {remedy}")

    def _json(self, method: str, path: str, **options: Any) -> Any:
        response = self._send(method, path, **options)
        try:
            return response.json()
        except ValueError as error:
            raise SamplerError(
                f"{self.url}/{path}: got {response.text[:120]!r}, expected JSON; check that the "
                "address is a vLLM server's"
            ) from error

    def _send(
        self,
        method: str,
        path: str,
        *,
        remedy: str = "check that the address is a vLLM server's",
        retries: int = 0,
        timeout: float = 10.0,
        **options: Any,
    ) -> httpx.Response:
        for attempt in range(retries + 1):
            try:
                response = self._client.request(method, path, timeout=timeout, **options)
            except httpx.TransportError as error:
                if attempt < retries and not isinstance(error, httpx.TimeoutException):
                    time.sleep(0.5 * 2**attempt)
                    continue
                raise SamplerError(
                    f"{self.url}: got {type(error).__name__} ({error}) from /{path}, expected an "
                    f"answer within {timeout:g} s; check that the server is up and its "
                    "address right, its log says why it ended"
                ) from error
            if response.status_code == 200:
                return response
            raise SamplerError(
                f"{self.url}/{path}: got HTTP {response.status_code} "
                f"({' '.join(response.text.split())[:300]}), expected 200; {remedy}"
            )
        raise AssertionError("unreachable")


def _same_model(served: str, wanted: str) -> bool:
    if served == wanted:
        return True
    return Path(served).exists() and Path(served).resolve() == Path(wanted).resolve()
