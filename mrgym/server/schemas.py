"""What travels between client and service: requests are strict, answers are typed.

The same records are JSON and msgpack; the service's OpenAPI is made of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from mrgym.scoring import Status
from mrgym.spaces import Message
from mrgym.tasks import Task
from mrgym.text import Split

__all__ = [
    "PROTOCOL_VERSION",
    "ComponentOut",
    "EnvOut",
    "ErrorDetail",
    "ErrorOut",
    "GateOut",
    "HealthOut",
    "LimitsOut",
    "PromptOut",
    "PromptsIn",
    "PromptsOut",
    "ResetIn",
    "ScoreIn",
    "ScoreItem",
    "ScoreOut",
    "ScoreResult",
    "SessionIn",
    "SessionOut",
    "StepIn",
    "TaskIn",
    "TaskPrompt",
    "TasksOut",
    "TransitionOut",
    "TurnItem",
    "TurnResult",
    "TurnsIn",
    "TurnsOut",
]

PROTOCOL_VERSION = 1

Key: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
TaskId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Random: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{1,32}(-[0-9a-f]{1,32}){3}$")]
Turns: TypeAlias = Annotated[list[str], msgspec.Meta(min_length=1)]


class Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a client sends: an unknown field is an error, never dropped."""


class TaskIn(Request):
    """A task of the client's own."""

    prompt: str | Annotated[list[Message], msgspec.Meta(min_length=1)]
    answer: Any = None
    id: str = ""
    metadata: dict[str, Any] = {}

    def task(self) -> Task:
        """Return it as a task."""
        return Task(self.prompt, self.answer, self.id, self.metadata)


class ScoreItem(Request):
    """One completion, with its tokens a turn: on a task given whole, or by its id."""

    completion: str | Turns
    task: TaskIn | None = None
    task_id: TaskId | None = None
    split: Split | None = None
    truncated: bool = False
    token_ids: list[list[Count]] = []

    @property
    def turns(self) -> list[str]:
        """What the policy said, one text a turn."""
        return [self.completion] if isinstance(self.completion, str) else self.completion


class ScoreIn(Request):
    """Completions to score."""

    items: Annotated[list[ScoreItem], msgspec.Meta(min_length=1)]


class TurnItem(ScoreItem):
    """The turns of a conversation so far; ``random`` is the state its random numbers started at."""

    random: Random | None = None


class TurnsIn(Request):
    """Conversations to go on with."""

    items: Annotated[list[TurnItem], msgspec.Meta(min_length=1)]


class PromptsIn(Request):
    """Tasks whose prompts are wanted."""

    tasks: Annotated[list[TaskIn], msgspec.Meta(min_length=1)]


class SessionIn(Request):
    """Opens a session; the same ``key`` again gives the same session."""

    key: Key | None = None


class ResetIn(Request):
    """Starts an episode. ``seq`` numbers the requests of a session: see :class:`TransitionOut`."""

    seq: Count | None = None
    seed: Count | None = None
    options: dict[str, Any] | None = None


class StepIn(Request):
    """One action, in the form its space takes on the wire."""

    action: Any
    seq: Count | None = None


class ScoreResult(msgspec.Struct, kw_only=True):
    """The scores of one completion; ``components`` is empty unless ``status`` is ``"ok"``.

    ``turn_scores`` is what the last turn was measured at, also where another score failed.
    """

    task_id: str
    components: dict[str, float]
    raw_components: dict[str, float]
    reward: float
    status: Status
    error: str | None
    terminated: bool
    truncated: bool
    turn_scores: dict[str, float] = {}


class ScoreOut(msgspec.Struct):
    """One result an item, in order."""

    results: list[ScoreResult]


class TurnResult(ScoreResult, kw_only=True):
    """What the last turn led to, and its random numbers' state; components come at the end."""

    messages: list[Message]
    answers: list[Message]
    random: Random | None = None


class TurnsOut(msgspec.Struct):
    """One result a conversation, in order."""

    results: list[TurnResult]


class PromptOut(msgspec.Struct, kw_only=True):
    """What a policy is asked, in every form, and a completion for full marks (or why none)."""

    text: str
    messages: list[Message]
    prefill: str
    chat_only: bool
    gold: str | None
    gold_error: str | None = None


class PromptsOut(msgspec.Struct):
    """One prompt a task, in order."""

    prompts: list[PromptOut]


class TaskPrompt(msgspec.Struct):
    """A task with its prompt."""

    task: Task
    prompt: PromptOut


class TasksOut(msgspec.Struct):
    """A page of a split."""

    total: int
    offset: int
    tasks: list[TaskPrompt]


class GateOut(msgspec.Struct):
    """A gate."""

    on: str
    at_least: float
    otherwise: float


class ComponentOut(msgspec.Struct, kw_only=True):
    """A component's declaration; no ``low`` or ``high`` means no bound."""

    name: str
    low: float | None
    high: float | None
    weight: float
    optional: bool
    gate: GateOut | None
    reduce: Literal["sum", "last", "max", "mean"]
    doc: str


class LimitsOut(msgspec.Struct, kw_only=True):
    """What one request, and all clients together, may ask for."""

    max_batch: int
    max_body_bytes: int
    max_sessions: int
    request_timeout: float


class EnvOut(msgspec.Struct, kw_only=True):
    """What the environment is.

    ``conversation`` is true where an episode is more than one completion scored, so that a text
    environment is driven through ``/turns``. ``split`` is where ``reset`` draws tasks from.
    """

    protocol: int
    mrgym: str
    id: str
    kind: Literal["text", "spaces"]
    components: list[ComponentOut]
    limits: LimitsOut
    split: Split = "train"
    max_turns: int = 1
    conversation: bool = False
    instruction: str = ""
    prefill: str = ""
    tasks: dict[str, int] = {}
    action_space: dict[str, Any] | None = None
    observation_space: dict[str, Any] | None = None
    nondeterministic: bool = False


class SessionOut(msgspec.Struct):
    """An open session; it ends after ``idle_timeout`` seconds without a request."""

    id: str
    idle_timeout: float


class TransitionOut(msgspec.Struct, kw_only=True):
    """What ``reset`` or ``step`` returned.

    ``seq`` counts the session's requests. A client that sends the number of its request may send
    the request again when the answer was lost: it gets the same answer and nothing runs twice.
    ``left_out`` names entries of ``info`` that have no form on the wire.
    """

    observation: Any
    info: dict[str, Any]
    seq: int
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    left_out: list[str] = []


class HealthOut(msgspec.Struct):
    """That the service is up."""

    status: Literal["ok"]


class ErrorDetail(msgspec.Struct):
    """What went wrong; ``subject`` names the part of the request, such as ``items[3]``."""

    type: str
    message: str
    request_id: str
    subject: str | None = None


class ErrorOut(msgspec.Struct):
    """An error."""

    error: ErrorDetail
