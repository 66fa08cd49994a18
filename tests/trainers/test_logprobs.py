"""Chunked log-probabilities: values and gradients of the whole softmax, without its memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mrgym_trainers.gdpo.logprobs import (
    checkpointed_logprobs,
    rows_per_chunk,
    selected_logprobs,
)

ROWS, WIDTH, VOCABULARY = 23, 16, 61


def drawn(*shape, seed=0, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
    return tensor.to(dtype).requires_grad_()


@pytest.fixture
def inputs():
    """Hidden states, weight, bias and targets; keys choose the dtype."""

    def make(*, dtype=torch.float32, weight_dtype=None):
        weight_dtype = weight_dtype or dtype
        return (
            drawn(ROWS, WIDTH, seed=1, dtype=dtype),
            drawn(VOCABULARY, WIDTH, seed=2, dtype=weight_dtype, scale=0.7),
            drawn(VOCABULARY, seed=3, dtype=weight_dtype),
            torch.randint(VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(4)),
        )

    return make


def naive(hidden, weight, bias, targets, temperature):
    """The whole softmax."""
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


def gradients(outputs, tensors):
    """Gradients of a fixed mixture of log-probabilities and entropies."""
    logprobs, entropy = outputs
    mixture = (logprobs * drawn(len(logprobs), seed=5, dtype=logprobs.dtype).detach()).sum()
    if entropy.requires_grad:
        mixture = mixture + (entropy * drawn(len(entropy), seed=6).detach()).sum()
    return torch.autograd.grad(mixture, [t for t in tensors if t is not None])


def through_any_head(hidden, weight, bias, targets, **options):
    """The same by the way for heads that are no linear layer."""
    head = torch.nn.functional.linear
    return checkpointed_logprobs(
        lambda rows: head(rows, weight, bias), hidden, targets, **{"chunk": ROWS, **options}
    )


WAYS = pytest.mark.parametrize("way", [selected_logprobs, through_any_head])


@WAYS
@pytest.mark.parametrize("chunk", [1, 7, 23, 1000])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_values_and_gradients_are_those_of_the_whole_softmax(
    inputs, way, chunk, with_bias, temperature
):
    """Case huggingface/trl#5349; NVIDIA-NeMo/RL#3124; #4222."""
    hidden, weight, bias, targets = inputs()
    bias = bias if with_bias else None
    got = way(
        hidden, weight, bias, targets, temperature=temperature, chunk=chunk, entropy_grad=True
    )
    expected = naive(hidden, weight, bias, targets, temperature)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.allclose(one, other, atol=1e-5)
    tensors = (hidden, weight, bias)
    for one, other in zip(gradients(got, tensors), gradients(expected, tensors), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
        assert other.abs().max() > 1e-2


@pytest.mark.parametrize("entropy_grad", [True, False])
def test_gradcheck(inputs, entropy_grad):
    hidden, weight, bias, targets = inputs(dtype=torch.float64)

    def function(hidden, weight, bias):
        outputs = selected_logprobs(
            hidden, weight, bias, targets[:6], temperature=0.7, chunk=4, entropy_grad=entropy_grad
        )
        return outputs if entropy_grad else outputs[0]

    few = [t.detach().clone().requires_grad_() for t in (hidden[:6], weight, bias)]
    assert torch.autograd.gradcheck(function, few)


@WAYS
def test_entropy_has_a_gradient_only_when_asked(inputs, way):
    given = inputs()
    assert not way(*given, temperature=1.0)[1].requires_grad
    assert way(*given, temperature=1.0, entropy_grad=True)[1].requires_grad


def test_entropy_alone_may_be_differentiated(inputs):
    hidden, weight, bias, targets = inputs()
    _, entropy = selected_logprobs(
        hidden, weight, bias, targets, temperature=1.3, chunk=5, entropy_grad=True
    )
    _, expected = naive(hidden, weight, bias, targets, 1.3)
    got = torch.autograd.grad(entropy.sum(), (hidden, weight))
    for one, other in zip(got, torch.autograd.grad(expected.sum(), (hidden, weight)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_frozen_inputs_get_no_gradient(inputs):
    hidden, weight, bias, targets = inputs()
    logprobs, _ = selected_logprobs(
        hidden, weight.detach(), bias.detach(), targets, temperature=1.0, chunk=5
    )
    (got,) = torch.autograd.grad(logprobs.sum(), hidden)
    (expected,) = torch.autograd.grad(naive(hidden, weight, bias, targets, 1.0)[0].sum(), hidden)
    assert torch.allclose(got, expected, atol=1e-5)
    with torch.no_grad():
        logprobs, _ = selected_logprobs(hidden, weight, bias, targets, temperature=1.0)
    assert not logprobs.requires_grad


def test_tied_embeddings_get_both_contributions():
    embedding = drawn(VOCABULARY, WIDTH, seed=2)
    tokens, targets = torch.arange(9), torch.arange(9) + 30

    def gradient(way):
        hidden = torch.tanh(embedding[tokens])
        return torch.autograd.grad(way(hidden).sum(), embedding)[0]

    def chunked(hidden):
        return selected_logprobs(hidden, embedding, None, targets, temperature=1.0, chunk=2)[0]

    got = gradient(chunked)
    expected = gradient(lambda hidden: naive(hidden, embedding, None, targets, 1.0)[0])
    assert torch.allclose(got, expected, atol=1e-5)


@WAYS
def test_no_rows_give_a_zero_gradient(inputs, way):
    """A fully masked micro-batch still has a loss to differentiate."""
    hidden, weight, bias, targets = inputs()
    logprobs, entropy = way(hidden[:0], weight, bias, targets[:0], temperature=1.0)
    assert logprobs.shape == entropy.shape == (0,)
    for gradient in torch.autograd.grad(logprobs.sum(), (hidden, weight, bias)):
        assert gradient.eq(0).all()


@WAYS
def test_impossible_tokens_have_no_part_in_entropy_and_gradient(inputs, way):
    hidden, weight, bias, targets = inputs()
    bias = bias.detach().clone()
    bias[40:] = -torch.inf
    targets = targets % 40
    got = way(hidden, weight, bias, targets, temperature=1.0, entropy_grad=True)
    expected = naive(hidden, weight[:40], bias[:40], targets, 1.0)
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    for one, other in zip(
        gradients(got, (hidden, weight)), gradients(expected, (hidden, weight)), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("scale", [1e3, 1e5])
def test_large_logits_do_not_overflow(inputs, scale):
    hidden, weight, bias, targets = inputs()
    got = selected_logprobs(hidden * scale, weight, bias, targets, temperature=1.0, chunk=5)
    expected = naive((hidden * scale).double(), weight.double(), bias.double(), targets, 1.0)
    assert torch.allclose(got[0].double(), expected[0], rtol=1e-5)
    assert torch.isfinite(got[1]).all()


# --- precision ------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_hidden_states_keep_softmax_and_sums_in_float32(inputs, weight_dtype):
    """Case sail-sg/Precision-RL-verl: rounding belongs into the products alone."""
    hidden, weight, bias, targets = inputs(dtype=torch.bfloat16, weight_dtype=weight_dtype)
    got = selected_logprobs(hidden, weight, bias, targets, temperature=0.9, chunk=5)
    assert {tensor.dtype for tensor in got} == {torch.float32}
    rounded = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*rounded)
    logprobs = (logits.float() / 0.9).log_softmax(-1)
    assert torch.allclose(got[0], logprobs.gather(1, targets[:, None])[:, 0], atol=1e-5)
    tensors = (hidden, weight, bias)
    found = gradients(got, tensors)
    assert [g.dtype for g in found] == [t.dtype for t in tensors]
    exact = naive(*(t.double() for t in tensors), targets, 0.9)
    for one, other in zip(found, gradients((exact[0], exact[1].detach()), tensors), strict=True):
        assert (one - other).abs().max() < 0.02 * other.abs().max()


def test_the_weight_gradient_is_summed_in_float32():
    """Many small contributions to one large one would be lost in bfloat16."""
    rows = 2049
    hidden = torch.full((rows, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.long)
    logprobs, _ = selected_logprobs(hidden, weight, None, targets, temperature=1.0, chunk=1)
    (got,) = torch.autograd.grad(logprobs.sum(), weight)
    assert got[0].item() == pytest.approx(rows / 2, rel=2**-8)


def test_autocast_around_it_does_not_round_float32_hidden_states(inputs):
    given = inputs()
    expected, _ = selected_logprobs(*given, temperature=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = selected_logprobs(*given, temperature=1.0)
    assert torch.equal(got, expected)


# --- memory ---------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@WAYS
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_no_tensor_holds_the_logits_of_all_rows(way, entropy_grad):
    hidden, weight = drawn(64, 4, seed=1), drawn(500, 4, seed=2)
    targets = torch.zeros(64, dtype=torch.long)
    with Largest() as seen:
        logprobs, entropy = way(
            hidden, weight, None, targets, temperature=1.0, chunk=8, entropy_grad=entropy_grad
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.elements == 8 * 500
    with Largest() as seen:
        naive(hidden, weight, None, targets, 1.0)[0].sum().backward()
    assert seen.elements == 64 * 500


def test_nothing_of_the_size_of_logits_is_kept_for_the_backward_pass():
    hidden, weight = drawn(64, 4, seed=1), drawn(500, 4, seed=2)
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        selected_logprobs(
            hidden, weight, None, torch.zeros(64, dtype=torch.long), temperature=1.0, chunk=8
        )
    assert max(kept) == weight.numel()


@pytest.mark.parametrize(
    ("vocabulary", "rows"), [(40, 104_857), (448, 9_362), (49_152, 128), (151_936, 128)]
)
def test_rows_follow_from_the_vocabulary(vocabulary, rows):
    assert rows_per_chunk(vocabulary) == rows
    assert rows_per_chunk(vocabulary, "cuda") == max(rows, 512)
