"""From conversations to token ids, through the model's chat template where it has one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from mrgym.errors import ConfigError
from mrgym.sampler import Prompt
from mrgym.spaces import Message

__all__ = ["TokenizerCodec", "stop_ids"]

_MARK = "\u2063mrgym\u2063"


class TokenizerCodec:
    """Encodes prompts once; what was sampled is never decoded and encoded again.

    Args:
        tokenizer: A Transformers tokenizer. With a chat template, messages are rendered through
            it; without one, the plain prompt is used.
        stop_ids: Tokens that end a completion; the tokenizer's own end token if left out.
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int] | None = None) -> None:
        self.tokenizer = tokenizer
        self._stop_ids = {tokenizer.eos_token_id} if stop_ids is None else set(stop_ids)
        self.uses_template = bool(getattr(tokenizer, "chat_template", None))
        probe = tokenizer("a").input_ids
        bos = tokenizer.bos_token_id
        self._bos = [bos] if bos is not None and probe[:1] == [bos] else []

    def start(self, prompt: Prompt) -> list[int]:
        """Return the ids of a conversation's first prompt, with one BOS if the model uses one.

        Raises:
            ConfigError: If nothing is left to encode, or the task is a conversation and the
                tokenizer has no chat template.
        """
        if prompt.chat_only and not self.uses_template:
            raise ConfigError(
                f"task {prompt.task_id!r}: got chat messages for a tokenizer without a chat "
                "template, expected one that renders them; use an instruct model, set the "
                "tokenizer's chat_template, or give the environment a plain_prompt"
            )
        text = self._render(prompt.messages) if self.uses_template else prompt.text
        ids = self._encode(_with_prefill(text, prompt.prefill))
        if self._bos and ids[:1] != self._bos:
            ids = self._bos + ids
        if not ids:
            raise ConfigError(
                f"task {prompt.task_id!r}: got a prompt without tokens, expected some text; "
                "give the task a prompt"
            )
        return ids

    def reply(self, prompt: Prompt, answers: Sequence[Message]) -> list[int]:
        """Return the ids between a finished completion and the policy's next turn."""
        if not self.uses_template:
            said = "\n".join(message["content"] for message in answers)
            return self._encode(_with_prefill(f"\n{said}\n", prompt.prefill))
        asked = Message(role="user", content="?")
        spoken = Message(role="assistant", content=_MARK)
        rendered = self._render([asked, spoken, *answers])
        tail = rendered[rendered.rindex(_MARK) + len(_MARK) :]
        ids = self._encode(_with_prefill(tail, prompt.prefill))
        # The completion's own end token closes its turn already.
        return ids[1:] if ids and ids[0] in self._stop_ids else ids

    def _render(self, messages: Sequence[Message]) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def _with_prefill(text: str, prefill: str) -> str:
    """Return a prompt that ends in the prefill; some templates open it themselves."""
    opened = text.rstrip().endswith(prefill.rstrip()) and prefill.strip() != ""
    return text if opened else text + prefill


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return every id that ends a completion: the tokenizer's and the generation config's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)
