"""The packaged policy: small, offline, exact with text, and placed where there is room to rise."""

from __future__ import annotations

import hashlib
import json
import random
import re
import socket

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from mrgym_envs.math_multi_reward.generator import generate, split_of
from mrgym_trainers.tiny_policy import tiny_policy_path
from mrgym_trainers.tiny_policy.build import WarmUp, build, new_tokenizer
from mrgym_trainers.tiny_policy.demonstrations import SlipRates, demonstrate, demonstrations
from mrgym_trainers.tiny_policy.tokenizer import EOS, TAGS

LAYOUT = re.compile(r"<think>[^<]*</think>\n<answer>([^<]*)</answer>")
FLAWLESS = SlipRates(carry=0, arithmetic=0, layout=0, text=0)


def scores(text, gold):
    """Correctness, format and integer as the environment defines them."""
    answer = text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    integer = re.fullmatch("[0-9]+", answer) is not None
    return answer == gold, LAYOUT.fullmatch(text) is not None, integer


def means(pairs):
    return torch.tensor([scores(text, gold) for text, gold in pairs]).double().mean(0).tolist()


@pytest.fixture(scope="module")
def tokenizer():
    """Loaded with every way to the network shut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", lambda *_: pytest.fail("asked the network"))
        return AutoTokenizer.from_pretrained(tiny_policy_path())


@pytest.fixture(scope="module")
def model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", lambda *_: pytest.fail("asked the network"))
        return AutoModelForCausalLM.from_pretrained(tiny_policy_path(), dtype=torch.float32)


@pytest.fixture(scope="module")
def held_out():
    return generate(split="eval", difficulty="easy", seed=11, count=256)


def completions(model, tokenizer, problems, **options):
    prompts = tokenizer([p.question + "\n" for p in problems], return_tensors="pt", padding=True)
    torch.manual_seed(0)
    ids = model.generate(**prompts, max_new_tokens=36, top_k=0, **options)
    texts = tokenizer.batch_decode(
        ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return list(zip(texts, [p.answer for p in problems], strict=True))


def test_the_folder_is_small_and_complete():
    sizes = {path.name: path.stat().st_size for path in tiny_policy_path().iterdir()}
    assert set(sizes) == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) < 4 * 2**20


def test_the_model_is_a_llama_that_vllm_can_serve(model, tokenizer):
    config = model.config
    assert isinstance(model, LlamaForCausalLM)
    assert (config.head_dim, config.num_attention_heads) == (32, 3)
    assert config.tie_word_embeddings
    assert config.max_position_embeddings >= 512
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "text",
    [
        "<think>3+4=7 7*2=14</think>\n<answer>14</answer>",
        "  two  spaces \n\n and\ttabs \r\n",
        "<answer> <answer></think>\n</answer>\n",
        "naïve 漢字 🙂 don't; 3.14 - 1,000 = $5!",
        " 12 345\n6 ",
        "<b>no tag</b> < think > </ answer>",
        "",
    ],
)
def test_text_survives_the_round_trip(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert all(0 <= i < len(tokenizer) for i in ids)


def test_tags_and_digits_are_tokens_and_nothing_is_added(tokenizer):
    text = "<think>12+3=15</think>\n<answer>15</answer>"
    pieces = [tokenizer.decode([i]) for i in tokenizer(text)["input_ids"]]
    assert pieces == ["<think>", *"12+3=15", "</think>", "\n", "<answer>", *"15", "</answer>"]
    assert not set(tokenizer.convert_tokens_to_ids(list(TAGS))) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(tokenizer("5" + EOS)["input_ids"], skip_special_tokens=True) == "5"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.bos_token_id is None


def test_prompt_and_completion_tokenise_apart_as_together(tokenizer, held_out):
    for p in held_out[:50]:
        prompt, completion = p.question + "\n", f"<think>{p.solution}</think>"
        apart = tokenizer(prompt)["input_ids"] + tokenizer(completion)["input_ids"]
        assert tokenizer(prompt + completion)["input_ids"] == apart
        assert len(apart) < 50


def test_greedy_knows_the_answers(model, tokenizer, held_out):
    correctness, layout, integer = means(completions(model, tokenizer, held_out, do_sample=False))
    assert 0.70 < correctness < 0.90
    assert min(layout, integer) > 0.97


def test_sampling_leaves_every_component_room(model, tokenizer, held_out):
    correctness, layout, integer = means(
        completions(model, tokenizer, held_out * 2, do_sample=True, temperature=1.0)
    )
    assert 0.22 < correctness < 0.40
    assert 0.50 < layout < 0.66
    assert 0.58 < integer < 0.75


def test_demonstrations_are_the_same_everywhere():
    some = list(demonstrations(seed=0, count=300))
    assert some == list(demonstrations(seed=0, count=400))[:300]
    assert some != list(demonstrations(seed=1, count=300))
    assert (
        hashlib.sha256(repr(some).encode()).hexdigest()
        == "dc575e405b42b9f84e8cdaac2f897406126b62529467cdbabce5fd7977d65df7"
    )


def test_demonstrations_come_from_train_only():
    for problem in generate(split="train", difficulty="easy", seed=0, count=2000):
        assert split_of(problem.operands) == "train"
    prompts = [d.prompt for d in demonstrations(seed=0, count=200)]
    problems = generate(split="train", difficulty="easy", seed=0, count=200)
    assert prompts == [p.question + "\n" for p in problems]


def test_flawless_demonstrations_score_full_marks():
    for p in generate(split="train", difficulty="easy", seed=4, count=300):
        shown = demonstrate(p, random.Random(0), FLAWLESS).completion
        assert scores(shown, p.answer) == (True, True, True)
        assert p.solution in shown


@pytest.mark.parametrize(
    ("rates", "broken"),
    [
        (SlipRates(carry=0, arithmetic=1, layout=0, text=0), 0),
        (SlipRates(carry=0, arithmetic=0, layout=1, text=0), 1),
        (SlipRates(carry=0, arithmetic=0, layout=0, text=1), 2),
    ],
)
def test_each_slip_breaks_its_own_component(rates, broken):
    problems = generate(split="train", difficulty="easy", seed=4, count=300)
    pairs = [(demonstrate(p, random.Random(i), rates).completion, p.answer)
             for i, p in enumerate(problems)]  # fmt: skip
    assert means(pairs)[broken] < 0.06


def test_a_forgotten_carry_is_the_classic_mistake():
    rates = SlipRates(carry=1, arithmetic=0, layout=0, text=0)
    problems = generate(split="train", difficulty="easy", seed=0, count=4000)
    shown = "".join(demonstrate(p, random.Random(0), rates).completion for p in problems)
    last_steps = dict(re.findall(r" (\d+\D\d+)=(\d+)<", shown))
    expected = {"36+5": "31", "36+15": "41", "27*4": "88", "19*2": "28", "20*3": "60", "15-8": "7"}
    assert {step: last_steps[step] for step in expected} == expected


def test_building_is_deterministic_and_the_package_is_up_to_date(tmp_path, tokenizer):
    for folder in ("a", "b"):
        build(tmp_path / folder, seed=3, warm_up_plan=WarmUp(steps=2, batch=8))
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in tiny_policy_path().iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    again = new_tokenizer(list(demonstrations(seed=0, count=8000)))
    assert (
        json.loads(again.backend_tokenizer.to_str())["model"]
        == json.loads((tiny_policy_path() / "tokenizer.json").read_text())["model"]
    )
