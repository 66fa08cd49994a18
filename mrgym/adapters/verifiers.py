"""verifiers (its v1 API): a mrgym environment as a taskset, and a taskset as an environment.

A module of yours that verifiers imports by name::

    # my_math.py:  vf-eval my-math --env.agent.harness.id null
    from mrgym.adapters.verifiers import taskset

    MyMath = taskset("math_multi_reward", weights={"format": 0.5})
    __all__ = ["MyMath"]

An environment of several turns exports its conversation beside::

    MyTalk = taskset("my_talk")
    MyTalkEnv = environment(MyTalk)
    __all__ = ["MyTalk", "MyTalkEnv"]

The way back::

    env = from_verifiers("gsm8k-v1", components={"correct": mrgym.Component(low=0, high=1)})
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from mrgym.adapters._common import need, no_prefill, text_env, warn_one_at_a_time, weights_by_name
from mrgym.adapters._verifiers_env import VerifiersEnv, from_verifiers
from mrgym.env import MultiRewardEnv
from mrgym.errors import RolloutError, ScoreError
from mrgym.rollout import Rollout, _begin, _play
from mrgym.sampler import Completion, ScriptedSampler, StopReason
from mrgym.score import _end_or_go_on, score_completions
from mrgym.scoring import InlineScorer
from mrgym.spaces import Message
from mrgym.tasks import Task
from mrgym.text import Split, TextEnv

__all__ = ["VerifiersEnv", "environment", "from_verifiers", "taskset"]

T = TypeVar("T")
Said: TypeAlias = "tuple[str, StopReason]"

_SAID = "mrgym_said"
_THREADS = 32


def taskset(
    env: MultiRewardEnv[Any, Any] | str,
    split: Split = "train",
    *,
    weights: Mapping[str, float] | None = None,
) -> Any:
    """Return a ``vf.Taskset`` class whose tasks are scored by the environment.

    Every component is a reward of its name, so verifiers' own settings reach it too
    (``--env.taskset.task.rewards.format.weight 0.5``). One that abstains leaves no key in
    ``trace.rewards``. A score function that fails makes the trace an error without scores. The
    final reply is what is scored, once for all components, off verifiers' event loop.

    Args:
        env: A text environment, or its id.
        split: Which tasks by default; ``--env.taskset.split eval`` chooses another time.
        weights: Weight by name; the declared one where left out.

    Raises:
        MissingExtraError: If verifiers is not installed.
        RewardDefinitionError: If ``env`` is no text environment or begins the policy's turn
            itself, or a weight has no component.
    """
    vf, text = need("verifiers.v1", "verifiers"), text_env(env, "verifiers")
    warn_one_at_a_time(text, "verifiers")
    no_prefill(text, "verifiers")
    scorer, default_split = _TraceScorer(text), split

    class MrgymData(vf.TaskData):  # type: ignore[misc, name-defined]
        answer: Any = None
        split: Split = default_split

    class MrgymTask(vf.Task[MrgymData, vf.State, vf.TaskConfig]):  # type: ignore[misc, name-defined]
        @property
        def key(self) -> str:
            return f"{self.data.split}/{self.data.id}"

    for name, weight in weights_by_name(text, weights, "verifiers").items():
        setattr(MrgymTask, f"reward_{name}", vf.reward(weight=weight)(_reward(name, scorer)))

    class MrgymTasksetConfig(vf.TasksetConfig):  # type: ignore[misc, name-defined]
        split: Split = default_split

    class MrgymTaskset(vf.Taskset[MrgymTask, MrgymTasksetConfig]):  # type: ignore[misc, name-defined]
        mrgym_scorer = scorer

        def load(self) -> Any:
            for task in text.task_source(self.config.split):
                data = {"id": task.id, "answer": task.answer, "split": self.config.split}
                yield MrgymTask(MrgymData(**_prompt(text, task), **data), self.config.task)

    return MrgymTaskset


def environment(tasks: Any) -> Any:
    """Return the ``vf.Env`` class that plays all turns of a :func:`taskset`.

    Its one agent is asked as by ``vf.SingleAgentEnv``; after every reply the environment answers
    or ends the conversation. Without it, verifiers would score the first reply for the whole.

    Args:
        tasks: What :func:`taskset` returned.
    """
    vf = need("verifiers.v1", "verifiers")
    scorer: _TraceScorer = tasks.mrgym_scorer

    class MrgymEnv(vf.Env[vf.SingleAgentEnvConfig]):  # type: ignore[misc, name-defined]
        async def run(self, task: Any, agents: Any) -> None:
            async with agents.agent.interaction(task) as interaction:
                await scorer.converse(task.data, interaction)
            scorer.forget(interaction.trace)

    return MrgymEnv


def _reward(name: str, scorer: _TraceScorer) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def reward(self: Any, trace: Any) -> dict[str, float]:
        components = await scorer.components(self.data, trace)
        return {name: components[name]} if name in components else {}

    reward.__name__ = name
    return reward


def _prompt(env: TextEnv, task: Task) -> dict[str, Any]:
    """Return prompt and system prompt, as text where a harness may know text only."""
    messages = env.messages(task)
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    asked = messages if system is None else messages[1:]
    if len(asked) == 1 and asked[0]["role"] == "user":
        return {"system_prompt": system, "prompt": asked[0]["content"]}
    return {"system_prompt": system, "prompt": [dict(message) for message in asked]}


class _TraceScorer:
    """Scores traces of one environment, each once however many rewards ask."""

    def __init__(self, env: TextEnv) -> None:
        self._env = env
        self._scoring: dict[str, asyncio.Future[dict[str, float]]] = {}
        self._played: dict[str, Rollout] = {}
        functions = (getattr(env, method.attribute) for method in env.score_methods.values())
        only_async = env.max_turns == 1 and all(map(inspect.iscoroutinefunction, functions))
        # What blocks (respond does) need not be fit for several threads at a time.
        self._pool = ThreadPoolExecutor(_THREADS if only_async else 1, "mrgym-scores")

    async def components(self, data: Any, trace: Any) -> dict[str, float]:
        """Return the components of a finished trace.

        Raises:
            RolloutError: If the trace holds no reply, or only the first of several turns.
            ScoreError: If a score function failed.
        """
        scoring = self._scoring.get(trace.id)
        if scoring is None:
            scoring = asyncio.ensure_future(self._score(data, trace))
            self._scoring[trace.id] = scoring
            scoring.add_done_callback(lambda _: self._scoring.pop(trace.id, None))
        return await scoring

    async def _score(self, data: Any, trace: Any) -> dict[str, float]:
        rollout = self._played.get(trace.id)
        if rollout is None:
            task, said = self._task(data), self._said(trace)
            (rollout,) = await self._off_loop(score_completions, self._env, [task], [said])
        if rollout.status != "ok":
            raise ScoreError(
                f"{self._env.contract_name}, task {data.id}: got {rollout.status} from "
                f"{rollout.error}, expected scores; mend the score function"
            )
        return rollout.components

    def _task(self, data: Any) -> Task:
        return self._env.task_source(data.split).by_id(data.id)

    async def _off_loop(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def _said(self, trace: Any) -> list[Completion]:
        if self._env.max_turns == 1:
            said = [_said(trace.assistant_messages, trace.root_reply, trace.is_truncated)]
        elif _SAID in trace.info:
            said = trace.info[_SAID]
        else:
            raise RolloutError(
                f"verifiers: got one reply for {self._env.contract_name} with up to "
                f"{self._env.max_turns} turns, expected the whole conversation; export "
                "mrgym.adapters.verifiers.environment(taskset) in the module's __all__ too"
            )
        return [Completion(text, stop_reason=reason) for text, reason in said]

    async def converse(self, data: Any, interaction: Any) -> None:
        """Play the turns as they are said, until the environment or a limit ends them."""
        task, trace = self._task(data), interaction.trace
        prompt = self._env.prompt_for(task)
        episode = (await self._off_loop(_begin, self._env, task, prompt, 0, 0, 1))[0]
        said: list[Said] = trace.info.setdefault(_SAID, [])
        segment = await interaction.turn()
        while not segment.terminated:
            said.append(_said(segment.messages, segment.root_reply, trace.is_truncated))
            turn = (episode, Completion(said[-1][0], stop_reason=said[-1][1]))
            script = ScriptedSampler([])
            await self._off_loop(_play, self._env, InlineScorer(), [turn], script, "mask")
            if episode.over:
                break
            segment = await interaction.turn(_answers(episode.state.messages))
        if said:
            _end_or_go_on(self._env, episode, 0, "mask")
            self._played[trace.id] = episode.rollout

    def forget(self, trace: Any) -> None:
        """Free what was kept of a conversation that is scored by now."""
        self._played.pop(trace.id, None)


def _answers(messages: list[Message]) -> str | list[dict[str, str]]:
    """Return what the environment said after the policy's last turn."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    answers = messages[last + 1 :]
    if len(answers) == 1 and answers[0]["role"] == "user":
        return answers[0]["content"]
    return [{"role": m["role"], "content": m["content"]} for m in answers]


def _said(messages: list[Any], root_reply: str | None, truncated: bool) -> Said:
    """Return what the agent said last, verbatim (verifiers' ``last_reply`` is stripped)."""
    replies = [message.content for message in messages if message.role == "assistant"]
    text = root_reply if root_reply is not None else replies[-1] if replies else None
    if text is None and not (replies and truncated):
        raise RolloutError(
            f"verifiers: got {len(replies)} replies, the last without text, expected a final "
            "reply; a refusal or a call of a tool is no completion"
        )
    return text or "", "length" if truncated else "stop"
