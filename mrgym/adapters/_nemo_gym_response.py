"""Reading completions out of Responses API objects, and writing them into such objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mrgym.errors import WireError
from mrgym.sampler import Completion
from mrgym.tasks import content_hash

__all__ = ["completion_of", "response_of", "text_of"]


def completion_of(response: Mapping[str, Any]) -> Completion:
    """Return what the assistant said in a response, as one completion.

    Output texts and refusals of all its messages are joined in order. Reasoning items come back
    as ``<think>...</think>``: NeMo Gym cut them out of the text when the model answered. Tool calls
    and their outputs are no text. An incomplete response is a truncated completion.

    Raises:
        WireError: If it is no response, or generation failed.
    """
    if response.get("error") or response.get("status") in ("failed", "cancelled"):
        raise WireError(
            f"response: got status {response.get('status')!r}, error {response.get('error')!r}, "
            "expected a finished generation; sample it again"
        )
    output = response.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise WireError(
            f"response: got output {output!r}"[:200] + ", expected a list of items; "
            "send the response as the model server gave it"
        )
    cut = response.get("status") == "incomplete" or bool(response.get("incomplete_details"))
    text = "".join(_said(item) for item in output)
    return Completion(text, stop_reason="length" if cut else "stop")


def response_of(completion: Completion, model: str = "mrgym") -> dict[str, Any]:
    """Return a completion as a response with one assistant message; equal ones get equal ids."""
    text = completion.text
    key = content_hash(text, None)
    status = "incomplete" if completion.truncated else "completed"
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": f"msg_{key}", "type": "message", "role": "assistant", "status": status}
    return {
        "id": f"resp_{key}",
        "object": "response",
        "created_at": 0.0,
        "model": model,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if completion.truncated else None,
        "output": [{**message, "content": [part]}],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def text_of(content: Any) -> str:
    """Return the text of a message's content: text, or a list of parts.

    Raises:
        WireError: If a part holds no text (an image, say).
    """
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_part(part) for part in content)
    raise _no_text(content)


def _said(item: Mapping[str, Any]) -> str:
    kind = item.get("type", "message")
    if kind == "reasoning":
        parts = item.get("summary") or item.get("content") or []
        return "".join(f"<think>{_part(part)}</think>" for part in parts)
    if kind == "message" and item.get("role") == "assistant":
        return text_of(item.get("content"))
    return ""


def _part(part: Any) -> str:
    if isinstance(part, Mapping):
        text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
        if isinstance(text, str):
            return text
    raise _no_text(part)


def _no_text(value: Any) -> WireError:
    return WireError(
        f"response: got content {value!r}"[:200] + ", expected text; only text can be scored"
    )
