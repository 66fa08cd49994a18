"""Samplers: whatever produces completions, from a script to a model or a remote endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from mrgym.errors import SamplerError
from mrgym.spaces import Message

if TYPE_CHECKING:
    import httpx

__all__ = [
    "Codec",
    "Completion",
    "OpenAISampler",
    "Prompt",
    "Sampler",
    "SamplingParams",
    "ScriptedSampler",
    "StopReason",
]

StopReason: TypeAlias = Literal["stop", "length"]


class Completion(str):
    """The text of one turn, with the tokens it was decoded from.

    It *is* the text, so a score function may treat it as a plain string.

    Attributes:
        token_ids: Sampled token ids, verbatim (with the end token, if one was sampled);
            empty when a sampler works on text alone.
        sampler_logprobs: The sampler's log-probability of each token, same length.
        stop_reason: ``"stop"``, or ``"length"`` where the token limit cut the completion.
        policy_version: Version of the weights that produced it.
    """

    __slots__ = ("policy_version", "sampler_logprobs", "stop_reason", "token_ids")

    token_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    stop_reason: StopReason
    policy_version: int

    def __new__(
        cls,
        text: str = "",
        *,
        token_ids: Iterable[int] = (),
        sampler_logprobs: Iterable[float] = (),
        stop_reason: StopReason = "stop",
        policy_version: int = 0,
    ) -> Completion:
        """Return the text with its tokens attached.

        Raises:
            TypeError: If ``text`` is not a string (``str(None)`` would make an answer of it).
        """
        if not isinstance(text, str):
            raise TypeError(f"Completion: got {text!r}, expected text; decode it first")
        self = super().__new__(cls, text)
        self.token_ids = tuple(token_ids)
        self.sampler_logprobs = tuple(sampler_logprobs)
        self.stop_reason = stop_reason
        self.policy_version = policy_version
        return self

    @property
    def text(self) -> str:
        """The text as a plain ``str``."""
        return str.__str__(self)

    @property
    def truncated(self) -> bool:
        """Whether the token limit cut the completion."""
        return self.stop_reason == "length"

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        return (self.text,), {name: getattr(self, name) for name in self.__slots__}


class Prompt(msgspec.Struct, frozen=True):
    """What a policy is asked, in every form a sampler may need.

    Attributes:
        text: The prompt as plain text, for models without a chat template.
        messages: The same as chat messages, for models with one.
        prefill: Text the policy's turn already begins with.
        token_ids: The tokens, once encoded; used verbatim when not empty.
        task_id: The task it comes from.
        seed: Seeds its completions, whatever is sampled beside it; the call's seed if left out.
        chat_only: Whether the task is a conversation, which plain text would not do justice.
    """

    text: str
    messages: list[Message]
    prefill: str = ""
    token_ids: list[int] = []
    task_id: str = ""
    seed: int | None = None
    chat_only: bool = False


class SamplingParams(msgspec.Struct, frozen=True):
    """How to sample.

    Attributes:
        max_tokens: Most tokens of one completion.
        temperature: 0 is greedy.
        top_p: Mass of the nucleus; 1 is off.
        top_k: Number of likeliest tokens kept; 0 is off.
        seed: Makes a call repeatable where the sampler supports it.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


class Codec(Protocol):
    """Turns conversations into token ids without ever re-tokenising what was sampled."""

    def start(self, prompt: Prompt) -> list[int]:
        """Return the ids of a conversation's first prompt."""
        ...

    def reply(self, prompt: Prompt, answers: Sequence[Message]) -> list[int]:
        """Return the ids that go between a completion and the policy's next turn."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """Produces completions."""

    codec: Codec | None
    """Set where the sampler works on token ids; ``None`` where it takes text."""

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        """Return ``n`` completions of every prompt, in order.

        Raises:
            SamplerError: If completions could not be produced; never an empty answer instead.
        """
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> None:
        """Take over new weights; later completions carry ``version``."""
        ...

    def close(self) -> None:
        """Free what the sampler holds."""
        ...


class _FixedWeights:
    """Shared by samplers whose weights mrgym does not own."""

    codec: Codec | None = None

    def update_weights(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> None:
        """Refuse: these weights belong to somebody else."""
        raise SamplerError(
            f"{type(self).__name__}: got new weights, expected none; it cannot be trained"
        )

    def close(self) -> None:
        """Nothing to free."""


class ScriptedSampler(_FixedWeights):
    """Replays completions: for tests, for scoring a file, for trying an environment.

    Args:
        script: A function of the prompt, a mapping from task id (or prompt text) to one completion
            or a list of them, or a sequence that is handed out in order.

    Raises:
        SamplerError: While sampling, when the script has nothing for a prompt.
    """

    def __init__(
        self,
        script: Callable[[Prompt], str] | Mapping[str, str | Sequence[str]] | Sequence[str],
    ) -> None:
        self._script = script
        self._position: dict[str, int] = {}

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        """Return the next ``n`` scripted completions of every prompt."""
        return [[self._next(prompt) for _ in range(n)] for prompt in prompts]

    def _next(self, prompt: Prompt) -> Completion:
        if callable(self._script):
            text = self._script(prompt)
        elif isinstance(self._script, Mapping):
            text = self._from_mapping(prompt, self._script)
        else:
            text = self._take("", self._script, "the script")
        if not isinstance(text, str):
            raise SamplerError(
                f"ScriptedSampler: got {text!r} for task {prompt.task_id!r}, expected text; "
                "return a completion for every prompt"
            )
        return text if isinstance(text, Completion) else Completion(text)

    def _from_mapping(self, prompt: Prompt, script: Mapping[str, str | Sequence[str]]) -> str:
        names = (prompt.task_id, prompt.text, prompt.text.strip())
        key = next((name for name in names if name in script), None)
        if key is None:
            raise SamplerError(
                f"ScriptedSampler: got no completion for task {prompt.task_id!r}, expected one; "
                "add it to the script"
            )
        entry = script[key]
        return entry if isinstance(entry, str) else self._take(key, entry, f"task {key!r}")

    def _take(self, key: str, entries: Sequence[str], subject: str) -> str:
        position = self._position.get(key, 0)
        if position >= len(entries):
            raise SamplerError(
                f"ScriptedSampler: got {len(entries)} completions for {subject}, expected more; "
                "lengthen the script or ask for fewer"
            )
        self._position[key] = position + 1
        return entries[position]


class OpenAISampler(_FixedWeights):
    """Samples from an OpenAI-compatible chat endpoint (vLLM server, SGLang, hosted models...).

    Args:
        base_url: Such as ``http://localhost:8000/v1``.
        model: Model name the endpoint knows.
        api_key: Sent as a bearer token if given.
        timeout: Seconds for one request.
        retries: How often a request is repeated after a connection error, 429 or 5xx.
        transport: An ``httpx`` transport, for tests and proxies.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout: float = 120.0,
        retries: int = 3,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(
            base_url=base_url.rstrip("/") + "/",
            headers=headers,
            timeout=timeout,
            transport=transport,
        )
        self._model = model
        self._retries = retries

    def sample(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> list[list[Completion]]:
        """Return ``n`` completions of every prompt, asking for several prompts at a time."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(max_workers=min(16, max(1, len(prompts)))) as pool:
            return list(
                pool.map(lambda i: self._ask(prompts[i], i, n, params), range(len(prompts)))
            )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(
        self, prompt: Prompt, position: int, n: int, params: SamplingParams
    ) -> list[Completion]:
        if params.seed is not None:  # prompts of a call must not share random numbers
            params = msgspec.structs.replace(params, seed=params.seed + position * n)
        completions: list[Completion] = []
        while len(completions) < n:  # some servers answer n=1 whatever was asked
            got = self._choices(self._body(prompt, n, len(completions), params))
            if not got:
                raise SamplerError(
                    f"{self._client.base_url}: got no choices, expected up to {n}; "
                    "check the model and its limits"
                )
            completions.extend(got)
        return completions[:n]

    def _body(self, prompt: Prompt, n: int, have: int, params: SamplingParams) -> dict[str, Any]:
        messages = list(prompt.messages)
        body: dict[str, Any] = {
            "model": self._model,
            "n": n - have,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        if prompt.prefill:
            messages.append(Message(role="assistant", content=prompt.prefill))
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if params.top_k:
            body["top_k"] = params.top_k
        if params.seed is not None:
            body["seed"] = params.seed + have
        return body | {"messages": messages}

    def _choices(self, body: dict[str, Any]) -> list[Completion]:
        reply = self._post(body)
        try:
            return [self._completion(choice) for choice in reply["choices"]]
        except (KeyError, TypeError) as error:
            raise SamplerError(
                f"{self._client.base_url}: got {str(reply)[:200]}, expected a chat completion "
                "with choices; check that the address is an OpenAI-compatible endpoint"
            ) from error

    def _completion(self, choice: dict[str, Any]) -> Completion:
        text = choice["message"]["content"]
        cut = choice.get("finish_reason") == "length"
        if text is None and not cut:
            raise SamplerError(
                f"{self._client.base_url}: got a choice without content ({str(choice)[:120]}), "
                "expected text; a refusal or a tool call is no completion"
            )
        return Completion("" if text is None else text, stop_reason="length" if cut else "stop")

    def _post(self, body: dict[str, Any]) -> Any:
        import httpx

        problem = "no attempt"
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(min(0.5 * 2**attempt, 8.0))
            try:
                response = self._client.post("chat/completions", json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 429 or response.status_code >= 500:
                problem = f"HTTP {response.status_code}"
                continue
            return self._json(response)
        raise SamplerError(
            f"{self._client.base_url}: got {problem} after {self._retries + 1} attempts, expected "
            "completions; check that the server is up and its address right"
        )

    def _json(self, response: httpx.Response) -> Any:
        if response.status_code != 200:
            raise SamplerError(
                f"{self._client.base_url}: got HTTP {response.status_code} "
                f"({response.text[:200]}), expected 200; check model name, key and parameters"
            )
        try:
            return response.json()
        except ValueError as error:
            raise SamplerError(
                f"{self._client.base_url}: got {response.text[:200]!r}, expected JSON; "
                "check that the address is an OpenAI-compatible endpoint"
            ) from error
