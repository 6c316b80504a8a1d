"""Log-probs and entropies from hidden states and an output weight against torch's own, values and gradients, in one
chunk and in many.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bench.kept_logits import log_probs_and_entropy as of_kept_logits
from tidemill.learner.kernels import logprobs
from tidemill.learner.kernels.logprobs import log_probs_and_entropy

T, V, H = 11, 29, 5
CHUNKS = pytest.mark.parametrize("columns", [1, 3, 7, V], ids=["1 id", "3 ids", "7 ids", "one chunk"])


def _inputs(
    dtype: torch.dtype = torch.float64, *, tokens: int = T, vocab: int = V, hidden: int = H
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight_VH = (
        (4 * hidden**-0.5 * torch.randn(vocab, hidden, generator=generator, dtype=torch.float64))
        .to(dtype)
        .requires_grad_()
    )
    return hidden_TH, weight_VH, torch.randint(vocab, (tokens,), generator=generator)


def _reference(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    log_p = ((hidden_TH @ weight_VH.t()) / temperature).log_softmax(-1)
    return log_p.gather(-1, targets_T[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _gradients(
    values: tuple[Tensor, Tensor], inputs: Sequence[Tensor], parts: Sequence[int] = (0, 1)
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(_total(values, parts), inputs, retain_graph=True)


def _total(values: tuple[Tensor, Tensor], parts: Sequence[int] = (0, 1)) -> Tensor:
    weights = torch.randn(2, len(values[0]), generator=torch.Generator().manual_seed(1), dtype=values[0].dtype)
    return torch.stack([(values[part] * weights[part]).sum() for part in parts]).sum()


@CHUNKS
def test_gradcheck(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 4 * columns)
    hidden_TH, weight_VH, targets_T = _inputs(tokens=4, vocab=10, hidden=3)
    kept = [tensor.detach().clone() for tensor in (hidden_TH, weight_VH)]
    assert torch.autograd.gradcheck(
        lambda h, w: log_probs_and_entropy(h, w, targets_T, temperature=0.7), (hidden_TH, weight_VH)
    )
    assert torch.equal(hidden_TH, kept[0]) and torch.equal(weight_VH, kept[1])


@CHUNKS
@pytest.mark.parametrize("each", [0.7, 0.0, "by token"])
@pytest.mark.parametrize(("scale", "cap"), [(0.3, 0.0), (1.0, 2.0), (0.3, 2.0)])
def test_logits_are_scaled_and_capped_before_the_temperature(
    scale: float, cap: float, each: float | str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As granite and gemma do."""
    temperature = torch.linspace(0.3, 1.7, T, dtype=torch.float64) if isinstance(each, str) else each
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", T * columns + 1)
    hidden_TH, weight_VH, targets_T = _inputs()
    ours = log_probs_and_entropy(hidden_TH, weight_VH, targets_T, temperature=temperature, scale=scale, cap=cap)
    logits_TV = scale * hidden_TH @ weight_VH.t()
    logits_TV = cap * torch.tanh(logits_TV / cap) if cap else logits_TV
    divisor = temperature[:, None] if isinstance(temperature, Tensor) else temperature or 1.0
    log_p = (logits_TV / divisor).log_softmax(-1)
    wanted = log_p.gather(-1, targets_T[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    for parts in ((0,), (0, 1)):
        found, expected = (_gradients(values, (hidden_TH, weight_VH), parts) for values in (ours, wanted))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-13)


@CHUNKS
@pytest.mark.parametrize("each", [0.6, 1.0, "by token"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_values_and_gradients(
    each: float | str, dtype: torch.dtype, tolerance: float, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    temperature = torch.linspace(0.3, 1.7, T) if isinstance(each, str) else each
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", T * columns + 1)
    hidden_TH, weight_VH, targets_T = _inputs(dtype)
    ours = log_probs_and_entropy(hidden_TH, weight_VH, targets_T, temperature=temperature)
    wanted = _reference(
        hidden_TH, weight_VH, targets_T, temperature[:, None] if isinstance(temperature, Tensor) else temperature
    )
    torch.testing.assert_close(ours, wanted, atol=tolerance, rtol=tolerance)
    for parts in ((0,), (1,), (0, 1)):
        found = _gradients(ours, (hidden_TH, weight_VH), parts)
        other = _gradients(wanted, (hidden_TH, weight_VH), parts)
        torch.testing.assert_close(found, other, atol=10 * tolerance, rtol=10 * tolerance)
        again = log_probs_and_entropy(hidden_TH, weight_VH, targets_T, temperature=temperature)
        assert all(map(torch.equal, again, ours))
        assert all(map(torch.equal, _gradients(again, (hidden_TH, weight_VH), parts), found))


def test_one_chunk_gives_the_bits_of_kept_logits() -> None:
    """A row with few logits is trained as by a linear layer and a loss on its logits."""
    for dtype in (torch.float32, torch.bfloat16):
        hidden_TH, weight_VH, targets_T = _inputs(dtype, tokens=40, vocab=300, hidden=32)
        ours = log_probs_and_entropy(hidden_TH, weight_VH, targets_T, temperature=0.7)
        wanted = of_kept_logits(hidden_TH @ weight_VH.t(), targets_T, temperature=0.7)
        assert all(map(torch.equal, ours, wanted))
        assert all(
            map(torch.equal, _gradients(ours, (hidden_TH, weight_VH)), _gradients(wanted, (hidden_TH, weight_VH)))
        )


@pytest.mark.parametrize("chunk", [64 * 40, 1 << 20])
def test_bfloat16_is_as_near_to_float32_as_kept_logits_are(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    hidden_TH, weight_VH, targets_T = _inputs(torch.bfloat16, tokens=64, vocab=2000, hidden=64)
    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden_TH, weight_VH)]
    wanted = _reference(exact[0], exact[1], targets_T)
    ours = log_probs_and_entropy(hidden_TH, weight_VH, targets_T)
    plain = of_kept_logits(hidden_TH @ weight_VH.t(), targets_T)
    assert ours[0].dtype == ours[1].dtype == torch.float32

    def errors(values: tuple[Tensor, Tensor]) -> list[float]:
        found = (*values, *_gradients(values, (hidden_TH, weight_VH)))
        others = (*wanted, *_gradients(wanted, exact))
        return [
            float((one.detach().float() - other.detach()).norm() / other.detach().norm())
            for one, other in zip(found, others, strict=True)
        ]

    for error, bound in zip(errors(ours), errors(plain), strict=True):
        assert 0 < error <= 1.05 * bound  # the parts of the hidden states' gradient are rounded before they are added
    assert {gradient.dtype for gradient in _gradients(ours, (hidden_TH, weight_VH))} == {torch.bfloat16}


class _Watched(TorchDispatchMode):
    """Records the number of elements of the largest result of an operation, and the number of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_no_tensor_has_the_size_of_all_logits(coefficient: float, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = 32 * 64
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    hidden_TH, weight_VH, targets_T = _inputs(torch.float32, tokens=64, vocab=512, hidden=4)
    with _Watched() as seen:
        log_probs_T, entropy_T = log_probs_and_entropy(hidden_TH, weight_VH, targets_T)
        (log_probs_T.sum() + coefficient * entropy_T.sum()).backward()
    assert seen.elements == chunk == weight_VH.numel()  # the weight's gradient is a result, too
    assert seen.products == 4 * 512 / 32
    assert weight_VH.grad is not None and hidden_TH.grad is not None


@pytest.mark.parametrize("columns", [8, V])
def test_a_frozen_weight_costs_no_product(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", columns * T)
    products, gradients = [], []
    for frozen in (False, True):
        hidden_TH, weight_VH, targets_T = _inputs()
        weight_VH.requires_grad_(not frozen)
        with _Watched() as seen:
            log_probs_and_entropy(hidden_TH, weight_VH, targets_T)[0].sum().backward()
        assert hidden_TH.grad is not None and (weight_VH.grad is None) is frozen
        products.append(seen.products)
        gradients.append(hidden_TH.grad)
    assert products[0] - products[1] == -(-V // columns)
    assert torch.equal(*gradients)


def test_logits_of_one_chunk_are_not_computed_again() -> None:
    hidden_TH, weight_VH, targets_T = _inputs(torch.float32)
    with _Watched() as seen:
        log_probs_and_entropy(hidden_TH, weight_VH, targets_T)[0].sum().backward()
    assert seen.products == 3 and seen.elements == T * V


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_weight_with_main_grad_is_added_there(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches, as Megatron's DistributedDataParallel has them: float32 sums, and nothing for autograd to add
    a second time.
    """
    hidden_TH, weight_VH, targets_T = _inputs(dtype)
    wanted = _gradients(log_probs_and_entropy(hidden_TH, weight_VH, targets_T), (hidden_TH, weight_VH))
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 4 * T)
    weight_VH.main_grad = torch.zeros(V, H)  # type: ignore[attr-defined]
    for micro_batches in (1, 2):
        _total(log_probs_and_entropy(hidden_TH, weight_VH, targets_T)).backward()
        assert weight_VH.grad is None
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(
            weight_VH.main_grad, micro_batches * wanted[1].float(), atol=tolerance, rtol=tolerance
        )  # type: ignore[attr-defined]
    assert weight_VH.main_grad.dtype == torch.float32  # type: ignore[attr-defined]


def test_a_placeholder_tells_megatrons_hook_whether_to_add_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two rows the first has logits in chunks, the second all in one: its gradient comes through autograd."""
    hidden_TH, weight_VH, targets_T = _inputs()
    wanted = _gradients(log_probs_and_entropy(hidden_TH, weight_VH, targets_T), (hidden_TH, weight_VH))[1]
    weight_VH.main_grad = torch.zeros(V, H, dtype=weight_VH.dtype)  # type: ignore[attr-defined]
    for micro_batch, (chunk, marked) in enumerate([(4 * T, True), (T * V, False), (4 * T, True)], 1):
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
        _total(log_probs_and_entropy(hidden_TH, weight_VH, targets_T, placeholder=True)).backward()
        assert weight_VH.grad is not None, "overlap_grad_reduce is not safe without"
        assert weight_VH.grad_added_to_main_grad is marked  # type: ignore[attr-defined]
        if not marked:
            weight_VH.main_grad += weight_VH.grad  # type: ignore[attr-defined]
        weight_VH.grad = None
        torch.testing.assert_close(weight_VH.main_grad, micro_batch * wanted, atol=1e-6, rtol=1e-6)  # type: ignore[attr-defined]


def test_greedy_temperature_leaves_the_logits_alone() -> None:
    inputs = _inputs()
    assert torch.equal(
        log_probs_and_entropy(*inputs, temperature=0)[0], log_probs_and_entropy(*inputs, temperature=1)[0]
    )
    assert not torch.equal(
        log_probs_and_entropy(*inputs, temperature=0.5)[0], log_probs_and_entropy(*inputs, temperature=1)[0]
    )


@pytest.mark.parametrize("chunk", [1, 3])
def test_huge_logits_stay_finite(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    hidden_TH = torch.tensor([[1e4]], requires_grad=True)
    weight_VH = torch.tensor([[-1.0], [1.0], [0.0]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(hidden_TH, weight_VH, torch.tensor([1]))
    assert log_probs.item() == 0 and entropy.item() == pytest.approx(0)
    for gradient in torch.autograd.grad(log_probs.sum() + entropy.sum(), (hidden_TH, weight_VH)):
        assert bool(torch.isfinite(gradient).all())
