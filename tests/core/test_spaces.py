"""Text and message spaces, alone and in Gymnasium's vector environments."""

from __future__ import annotations

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector.utils import batch_space

import mrgym
from mrgym.errors import SpaceError
from mrgym.spaces import MessagesSpace, TextSpace, is_messages

TEXTS = ["", "plain", "héllo", "漢字🎲", "a\x00b", "\u202eright to left", "two\nlines", "x" * 64]
SPACES = [TextSpace(64), MessagesSpace(64)]


def message(content, role="user"):
    return {"role": role, "content": content}


@pytest.mark.parametrize("space", SPACES, ids=repr)
class TestBothSpaces:
    def test_samples_lie_within_and_follow_the_seed(self, space):
        space.seed(3)
        first = [space.sample() for _ in range(50)]
        space.seed(3)
        assert [space.sample() for _ in range(50)] == first
        assert all(sample in space for sample in first)
        assert len({repr(sample) for sample in first}) > 10

    def test_equality_is_type_and_length(self, space):
        assert space == type(space)(64)
        assert space != type(space)(65)
        assert TextSpace(64) != MessagesSpace(64)

    @pytest.mark.parametrize(
        "duplicate",
        [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))],
        ids=["copy", "pickle"],
    )
    def test_copies_are_equal(self, space, duplicate):
        assert duplicate(space) == space

    def test_it_is_not_flattenable(self, space):
        assert not space.is_np_flattenable

    @pytest.mark.parametrize("length", [0, -1])
    def test_room_for_nothing_is_refused(self, space, length):
        with pytest.raises(SpaceError, match=r"max_length=.*expected at least 1"):
            type(space)(length)

    def test_a_batch_is_a_tuple(self, space):
        batch = batch_space(space, 3)
        assert batch.sample() in batch
        assert len(batch.sample()) == 3


class TestTextSpace:
    @pytest.mark.parametrize("text", TEXTS)
    def test_any_unicode_is_in(self, text):
        assert text in TextSpace(64)

    @pytest.mark.parametrize("value", ["x" * 65, b"x", None, 3, ["x"], np.array("x")], ids=repr)
    def test_long_texts_and_other_types_are_out(self, value):
        assert value not in TextSpace(64)


class TestMessagesSpace:
    @pytest.mark.parametrize(
        "value", [[], [message("hi")], [message("a" * 32), message("b" * 32, "assistant")]]
    )
    def test_short_conversations_are_in(self, value):
        assert value in MessagesSpace(64)

    @pytest.mark.parametrize(
        "value",
        [
            "hi",
            [message("a" * 33), message("b" * 32)],
            [{"role": "user"}],
            [{"content": "hi"}],
            [message(None)],
            [message("hi", None)],
            ["hi"],
            None,
        ],
        ids=repr,
    )
    def test_long_ones_and_other_shapes_are_out(self, value):
        assert value not in MessagesSpace(64)

    def test_a_conversation_is_recognised(self):
        assert is_messages([message("hi")])
        assert not is_messages("hi")
        assert not is_messages([message(3)])


class Mirror(mrgym.MultiRewardEnv[str, str]):
    """Observes what was said; rewards its length."""

    components = mrgym.components(length=mrgym.Component(low=0), first=mrgym.Component())

    def __init__(self, messages=False, max_length=64):
        self.observation_space = (MessagesSpace if messages else TextSpace)(max_length)
        self.action_space = TextSpace(4096)
        self.messages = messages

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observed("start"), {}

    def step(self, action):
        scores = {"length": len(action), "first": 0.5 if action else 0}
        return self.emit(self.observed(action), scores, truncated=action == "end")

    def observed(self, text):
        return [message(text), message(text, "assistant")] if self.messages else text


def vector_env(kind, count=2, **options):
    makers = [lambda: Mirror(**options) for _ in range(count)]
    if kind == "sync":
        return gym.vector.SyncVectorEnv(makers)
    return gym.vector.AsyncVectorEnv(makers, shared_memory=kind == "shared", context="fork")


@pytest.mark.parametrize("kind", ["sync", "shared", "piped"])
class TestVectorEnvs:
    @pytest.mark.parametrize("messages", [False, True], ids=["text", "messages"])
    def test_observations_arrive_whole_and_follow_the_steps(self, kind, messages):
        vector, seen = vector_env(kind, messages=messages), Mirror(messages).observed
        try:
            assert tuple(vector.reset(seed=0)[0]) == (seen("start"),) * 2
            kept = []
            for one, two in zip(TEXTS, TEXTS[::-1], strict=True):
                kept.append((vector.step((one, two))[0], (seen(one), seen(two))))
            assert all(tuple(observed) == wanted for observed, wanted in kept)
        finally:
            vector.close()

    def test_components_and_masks_arrive_as_float_arrays(self, kind):
        vector = vector_env(kind)
        try:
            vector.reset(seed=0)
            _, rewards, _, truncated, infos = vector.step(("", "end"))
            assert infos["reward_components"]["length"].tolist() == [0.0, 3.0]
            assert infos["reward_components"]["first"].tolist() == [0.0, 0.5]
            assert infos["reward_components"]["_first"].tolist() == [True, True]
            assert rewards.tolist() == [0.0, 3.5]
            assert truncated.tolist() == [False, True]
            assert vector.step(("a", "ignored"))[0][1] == "start"
        finally:
            vector.close()


class TestSharedMemory:
    @pytest.mark.parametrize("text", ["🎲" * 8, "é" * 8, "x" * 8, "\x00" * 8], ids=ascii)
    @pytest.mark.parametrize("messages", [False, True], ids=["text", "messages"])
    def test_the_longest_observation_fits_whatever_its_letters(self, text, messages):
        text = text[:4] if messages else text
        vector = vector_env("shared", 1, messages=messages, max_length=8)
        try:
            vector.reset(seed=0)
            assert vector.step((text,))[0][0] == Mirror(messages).observed(text)
        finally:
            vector.close()

    @pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")  # Gymnasium repeats the error
    def test_a_too_long_observation_is_an_error_with_a_remedy(self):
        vector = vector_env("shared", 1, max_length=8)
        vector.reset(seed=0)
        with pytest.raises(SpaceError, match=r"TextSpace\(8\).*raise max_length or use"):
            vector.step(("x" * 2000,))
        vector.close(terminate=True)

    @pytest.mark.parametrize("shared_memory", [True, False])
    def test_spawned_processes_know_the_spaces_too(self, shared_memory):
        options = {"shared_memory": shared_memory, "context": "spawn"}
        vector = mrgym.make_vec(
            "math_multi_reward", 1, mode="async", vector_kwargs=options, train_count=4, eval_count=4
        )
        try:
            assert vector.reset(seed=0)[0][0].endswith("\n")
            _, _, _, _, infos = vector.step(("<think>é</think>\n<answer>4</answer>",))
            assert infos["reward_components"]["format"].tolist() == [1.0]
        finally:
            vector.close()
