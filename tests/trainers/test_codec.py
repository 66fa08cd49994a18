"""From conversations to token ids: one BOS, the template's own turns, nothing encoded twice."""

import pytest

import mrgym
from mrgym.errors import ConfigError
from mrgym.rollout import run_groups
from mrgym.sampler import Prompt, SamplingParams
from mrgym_trainers.samplers import TransformersSampler
from mrgym_trainers.samplers.codec import TokenizerCodec

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + TURNS
OPENS_THINK = TURNS.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
ANSWER = [{"role": "user", "content": "no, again"}]


def user(text):
    return [{"role": "user", "content": text}]


def prompt(text, **keys):
    return Prompt(text, user(text), **keys)


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


# --- the first prompt -----------------------------------------------------------------------


def test_with_a_template_messages_are_rendered(build):
    tokenizer = build.tokenizer(template=TURNS)
    ids = TokenizerCodec(tokenizer).start(Prompt("plain", user("chat")))
    assert decoded(tokenizer, ids) == "<|user|>chat<eos>\n<|assistant|>"
    assert tokenizer.eos_token_id in ids


def test_without_a_template_the_plain_prompt_is_used(build):
    tokenizer = build.tokenizer()
    ids = TokenizerCodec(tokenizer).start(Prompt("plain", user("chat")))
    assert decoded(tokenizer, ids) == "plain"


@pytest.mark.parametrize("template", [WITH_BOS, TURNS, None])
def test_there_is_exactly_one_bos(build, template):
    """Case vllm-project/vllm#27515; unslothai/unsloth#10312; huggingface/trl#3520.

    A template that emits BOS, one that does not, and a raw prompt.
    """
    tokenizer = build.tokenizer(bos=True, template=template)
    ids = TokenizerCodec(tokenizer).start(prompt("the cat"))
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    reply = TokenizerCodec(tokenizer).reply(prompt("the cat"), ANSWER)
    assert tokenizer.bos_token_id not in reply


@pytest.mark.parametrize("template", [TURNS, None])
def test_a_model_without_bos_gets_none(build, template):
    tokenizer = build.tokenizer(template=template)
    assert 2 not in TokenizerCodec(tokenizer).start(prompt("the cat"))


def test_a_raw_prompt_that_brings_its_bos_keeps_one(build):
    tokenizer = build.tokenizer(bos=True)
    ids = TokenizerCodec(tokenizer).start(prompt("<bos>the cat"))
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("template", [TURNS, None])
def test_the_prefill_is_appended_once(build, template):
    tokenizer = build.tokenizer(template=template)
    text = decoded(tokenizer, TokenizerCodec(tokenizer).start(prompt("q", prefill="<think>")))
    assert text.endswith(("<|assistant|><think>", "q<think>"))
    assert text.count("<think>") == 1


def test_a_prefill_that_the_template_opened_is_not_repeated(build):
    """Case huggingface/trl#6966; #7141: the template already opened <think>."""
    codec = TokenizerCodec(build.tokenizer(template=OPENS_THINK))
    for ids in (
        codec.start(prompt("q", prefill="<think>")),
        codec.reply(prompt("q", prefill="<think>"), ANSWER),
    ):
        text = decoded(codec.tokenizer, ids)
        assert text.count("<think>") == 1
        assert text.endswith("<|assistant|><think>\n")


def test_a_prefill_of_blanks_is_appended_too(build):
    codec = TokenizerCodec(build.tokenizer())
    assert decoded(codec.tokenizer, codec.start(prompt("q", prefill="\n"))) == "q\n"


def test_a_prompt_without_tokens_is_refused_by_task(build):
    with pytest.raises(ConfigError, match="task 'empty': got a prompt without tokens"):
        TokenizerCodec(build.tokenizer()).start(prompt("", task_id="empty"))


# --- later turns ----------------------------------------------------------------------------


@pytest.mark.parametrize("template", [WITH_BOS, TURNS])
def test_the_reply_is_what_the_template_puts_between_turns(build, template):
    tokenizer = build.tokenizer(bos=template == WITH_BOS, template=template)
    codec = TokenizerCodec(tokenizer)
    said = [*tokenizer("the tab", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    ids = [*codec.start(prompt("q")), *said, *codec.reply(prompt("q"), ANSWER)]
    spoken = {"role": "assistant", "content": "the tab"}
    whole = tokenizer.apply_chat_template(
        [*user("q"), spoken, *ANSWER], tokenize=False, add_generation_prompt=True
    )
    assert ids == tokenizer(whole, add_special_tokens=False).input_ids


def test_an_end_of_turn_that_is_not_eos_stands_once(build):
    """Chat models often end a turn by a token of its own beside the tokenizer's EOS."""
    tokenizer = build.tokenizer(template=TURNS.replace("<eos>", "<pad>"))
    codec = TokenizerCodec(tokenizer, stop_ids={0, 1})
    said = [9, tokenizer.pad_token_id]
    ids = [*codec.start(prompt("q")), *said, *codec.reply(prompt("q"), ANSWER)]
    assert "<pad><pad>" not in decoded(tokenizer, ids)
    assert decoded(tokenizer, ids).endswith("<pad>\n<|user|>no, again<pad>\n<|assistant|>")


def test_the_sampler_tells_its_codec_what_ends_a_completion(build):
    tokenizer = build.tokenizer(template=TURNS.replace("<eos>", "<pad>"))
    sampler = TransformersSampler(build.model(tokenizer, ending=[0, 1]), tokenizer)
    reply = sampler.codec.reply(prompt("q"), ANSWER)
    assert decoded(tokenizer, reply).startswith("\n<|user|>")


def test_without_a_template_the_reply_stands_on_its_own_line(build):
    tokenizer = build.tokenizer()
    reply = TokenizerCodec(tokenizer).reply(prompt("q", prefill="<think>"), ANSWER)
    assert decoded(tokenizer, reply) == "\nno, again\n<think>"


def test_a_reply_of_several_messages_keeps_their_order(build):
    tokenizer = build.tokenizer(template=TURNS)
    answers = [{"role": "tool", "content": "42"}, {"role": "user", "content": "so?"}]
    text = decoded(tokenizer, TokenizerCodec(tokenizer).reply(prompt("q"), answers))
    assert text == "\n<|tool|>42<eos>\n<|user|>so?<eos>\n<|assistant|>"


# --- whole conversations --------------------------------------------------------------------


class Recording(TransformersSampler):
    """Remembers what it was asked and what it sampled."""

    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer)
        self.turns = []

    def stream(self, prompts, n, params):
        found = {}
        for i, j, completion in super().stream(prompts, n, params):
            found[i, j] = (prompts[i].token_ids, completion)
            yield i, j, completion
        self.turns.append([found[place] for place in sorted(found)])


def conversations(build, env, template=None):
    tokenizer = build.tokenizer(template=template)
    sampler = Recording(build.model(tokenizer), tokenizer)
    tasks = env.task_source("train")[:4]
    groups = run_groups(env, sampler, tasks, 8, SamplingParams(10, 1.0, seed=16))
    rollouts = [r for group in groups for r in group.rollouts]
    assert {len(r.turns) for r in rollouts} == {1, 2}
    return sampler, rollouts


@pytest.mark.parametrize("template", [TURNS, None])
def test_sampled_ids_go_verbatim_from_turn_to_turn(build, envs, template):
    """Case huggingface/trl#5224; #5242; stanford-cs336/assignment5-alignment#15.

    A rollout is prompt ids, completion ids, new ids; as many masks and log-probabilities.
    """
    sampler, rollouts = conversations(build, envs.Chat(), template)
    (first, second), later = sampler.turns, iter(sampler.turns[1])
    for (_, completion), rollout in zip(first, rollouts, strict=True):
        ids = list(completion.token_ids)
        assert rollout.token_ids[: len(ids)] == ids
        assert len(rollout.token_ids) == len(rollout.loss_mask) == len(rollout.sampler_logprobs)
        if len(rollout.turns) == 2:
            asked, answer = next(later)
            reply = sampler.codec.reply(prompt(""), user("and then?"))
            assert asked == [*rollout.prompt_token_ids, *ids, *reply]
            assert rollout.token_ids == [*ids, *reply, *answer.token_ids]
    assert len(second) == sum(len(r.turns) == 2 for r in rollouts)


def test_ids_that_encode_differently_are_kept(build, envs):
    """Case huggingface/trl#5224: what was sampled need not be what its text encodes to."""
    sampler, rollouts = conversations(build, envs.Chat())
    encode = sampler.codec.tokenizer
    sampled = [c for turn in sampler.turns for _, c in turn]
    assert any(encode(c.text).input_ids != list(c.token_ids) for c in sampled)
    kept = [[t for t, own in zip(r.token_ids, r.loss_mask, strict=True) if own] for r in rollouts]
    assert sum(map(len, kept)) == sum(len(c.token_ids) for c in sampled)


def test_only_sampled_tokens_are_learned_from(build, envs):
    """Case huggingface/trl#4975; NVIDIA-NeMo/RL#2176; mll-lab-nu/RAGEN#71.

    The prompt holds an assistant turn and tool text that nobody sampled here.
    """
    history = [
        *user("what is 6 x 7?"), {"role": "assistant", "content": "let me look"},
        {"role": "tool", "content": "42"},
    ]  # fmt: skip

    class History(envs.Chat):
        def tasks(self, split):
            return [mrgym.Task(prompt=[*history, *user(f"{split} {i}")]) for i in range(4)]

    sampler, rollouts = conversations(build, History(), TURNS)
    for rollout in rollouts:
        text = decoded(sampler.codec.tokenizer, rollout.prompt_token_ids)
        assert "let me look<eos>" in text
        assert "<|tool|>42<eos>" in text
        own = [x for x, sampled in zip(rollout.sampler_logprobs, rollout.loss_mask, strict=True)
               if sampled]  # fmt: skip
        assert all(x < 0 for x in own)
        assert sum(rollout.sampler_logprobs) == pytest.approx(sum(own))
    two = next(r for r in rollouts if len(r.turns) == 2)
    between = [t for t, own in zip(two.token_ids, two.loss_mask, strict=True) if not own]
    assert "and then?" in decoded(sampler.codec.tokenizer, between)


def test_a_conversation_needs_a_template_unless_the_environment_renders_it(build):
    class Chatty(mrgym.SingleTurnEnv):
        def tasks(self, split):
            said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": split}]
            return [mrgym.Task(prompt=said)]

        @mrgym.component(low=0, high=1)
        def brief(self, task, completion):
            return len(completion) < 9

    class Rendered(Chatty):
        def plain_prompt(self, task):
            return task.prompt[-1]["content"]

    plain, chat = TokenizerCodec(build.tokenizer()), TokenizerCodec(build.tokenizer(template=TURNS))
    (task,) = Chatty().task_source("train")
    with pytest.raises(ConfigError, match="chat messages for a tokenizer without a chat template"):
        plain.start(Chatty().prompt_for(task))
    assert plain.start(Rendered().prompt_for(task))
    assert chat.start(Chatty().prompt_for(task))
