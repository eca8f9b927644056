"""Weight gradients in float32, the norm with one wait, fused and offloaded AdamW on a GPU, against their references.

python -m pytest tests/gpu/test_linear_and_optimizer_on_gpu.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.compat import megatron_gradients
from slime.ops.linear import add_fused, add_reference, fused_problem
from slime.training.model.log_probs import VocabShard, score_tokens
from slime.training.step.adamw import EXP_AVG, MASTER, HeldAdamW, Holding
from slime.training.step.optimizer import apply_update
from slime.training.step.train_step import run_step
from tests.support.engine_parity import one_rank
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch
from tests.support.training_ranks import run_layouts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = [(1, 8, 8), (33, 3, 5), (7, 24, 40), (513, 320, 1000), (4096, 1024, 256), (100_000, 64, 128)]
HALF: dict[str, Any] = {"bf16": True, "adam_eps": 1e-3}
OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
PRECISE: dict[str, Any] = {
    "use_precision_aware_optimizer": True,
    "main_params_dtype": "float16",
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
}


@contextmanager
def _no_waits() -> Iterator[None]:
    """Raises where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def make_backend() -> Iterator[Callable[..., Any]]:
    """`make_backend(checkpoint, **settings)` on the GPU; making another one closes the one before."""
    with ExitStack() as current:

        def make(checkpoint: Path, **settings: Any) -> Any:
            current.close()
            return current.enter_context(one_rank(checkpoint, device="cuda", **settings))

        yield make


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", "qwen3", tied=True, head_dim=64)


def test_this_gpu_adds_in_float32() -> None:
    assert fused_problem(torch.device("cuda")) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_of_products_is_nearer_to_the_exact_one_than_that_of_the_plain_form(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    tokens, out, size = shape
    torch.manual_seed(0)
    fused, plain = (torch.full((out, size), 0.5, device="cuda") for _ in range(2))
    exact = fused.double()
    for _ in range(4):
        grad = torch.randn(tokens, out, device="cuda").to(dtype)
        inputs = torch.randn(tokens, size, device="cuda").to(dtype)
        with _no_waits():
            add_fused(fused, grad, inputs)
            add_reference(plain, grad, inputs)
        exact += grad.double().t() @ inputs.double()
    errors = [float((x - exact).norm() / exact.norm()) for x in (fused, plain)]
    assert errors[0] <= 1.1 * errors[1] + 2**-11, errors  # of one token, what is rounded twice may be lucky
    if dtype != torch.float32:
        assert errors[0] < 1e-4, f"{errors[0]:.1e}: the product was rounded to half precision"


def test_no_tokens_and_strided_parts_of_a_sum() -> None:
    total = torch.ones(16, 8, device="cuda")
    empty = torch.empty(0, 16, device="cuda", dtype=torch.bfloat16)
    add_fused(total, empty, empty[:, :8])
    assert torch.equal(total, torch.ones_like(total))
    wide = torch.randn(33, 48, device="cuda").to(torch.bfloat16)
    grad, inputs = wide[:, :12], wide[:, 40:]
    add_fused(total[:12], grad, inputs)
    torch.testing.assert_close(total[:12].double(), 1 + grad.double().t() @ inputs.double(), rtol=1e-4, atol=1e-4)
    assert torch.equal(total[12:], torch.ones(4, 8, device="cuda"))


@pytest.mark.parametrize("num_tokens", [0, 1, 77])
@pytest.mark.parametrize("chunk_tokens", [16, 0])
def test_the_output_layer_adds_its_gradient_as_precisely(num_tokens: int, chunk_tokens: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, 64, device="cuda").to(torch.bfloat16)
    weight = (torch.randn(136, 64, device="cuda") / 8).to(torch.bfloat16)
    targets = torch.randint(0, 131, (num_tokens,), device="cuda")
    exact_weight = weight.double().requires_grad_()
    scores = torch.log_softmax(hidden.double() @ exact_weight[:131].t(), -1).gather(1, targets[:, None])
    exact = torch.autograd.grad(scores.sum(), exact_weight)[0]
    errors = []
    for into_main_grad in (True, False):
        trained: Any = torch.nn.Parameter(weight.clone())
        trained.main_grad, trained.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.float32), False
        got = score_tokens(
            hidden,
            trained,
            targets,
            VocabShard(0, 131, None),
            chunk_tokens=chunk_tokens,
            into_main_grad=into_main_grad,
        )
        got.log_probs.sum().backward()
        assert trained.grad_added_to_main_grad == into_main_grad
        found = trained.main_grad if into_main_grad else trained.grad
        errors.append(float((found.double() - exact).norm() / exact.norm().clamp_min(1e-9)))
    assert errors[0] <= 1.1 * errors[1] + 2**-11, errors  # of one token, what is rounded twice may be lucky


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_gradients_of_a_model_are_no_further_from_float32_than_without_fusion(family: str, tmp_path: Path) -> None:
    checkpoint = write_tiny_model(tmp_path / "model", family, tied=family == "qwen3", head_dim=64)
    layouts: dict[str, dict[str, Any]] = {
        "exact": {"megatron": {}, "args": {"device": "cuda"}},
        "fused": {"megatron": {"bf16": True}, "args": {"device": "cuda"}},
        "overlapped": {"megatron": {"bf16": True, "overlap_grad_reduce": True}, "args": {"device": "cuda"}},
        "plain": {"megatron": {"bf16": True, "gradient_accumulation_fusion": False}, "args": {"device": "cuda"}},
    }
    defaults = {"checkpoint": str(checkpoint), "scenarios": {"four": {}}, "provoke": False, "world_size": 1}
    with Ranks(fresh=True) as ranks:
        found = {
            name: outcome.gradients["four"]
            for name, outcome in run_layouts(ranks, tmp_path / "out", layouts, defaults=defaults).items()
        }
    exact = found.pop("exact")
    errors = {
        name: float(sum((own[n].double() - x.double()).square().sum() for n, x in exact.items()).sqrt())
        / float(sum(x.double().square().sum() for x in exact.values()).sqrt())
        for name, own in found.items()
    }
    assert errors["fused"] <= 1.1 * errors["plain"] + 1e-6, errors
    assert errors["overlapped"] <= 1.1 * errors["plain"] + 1e-6, errors


def test_the_norm_and_the_clip_are_those_of_one_long_vector_and_nothing_waits() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(size, device="cuda") * scale for size, scale in ((1, 9.0), (1 << 20, 0.1), (77, 1e3))]
    want = float(torch.cat(grads).double().norm())
    with _no_waits():
        norm, _ = megatron_gradients.l2_norm(0, None, [grads], False)
        megatron_gradients.scale(0, None, [grads, grads], 0.5)
    assert float(norm) == pytest.approx(want, rel=1e-5)
    assert float(torch.cat(grads).double().norm()) == pytest.approx(want / 2, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, PRECISE], ids=["fused", "held"])
def test_an_optimizer_step_reads_one_number(
    settings: dict[str, Any], model: Path, make_backend: Callable[..., Any]
) -> None:
    """However many parameters there are; the first step makes the state."""
    backend = make_backend(model, megatron={**HALF, **settings, "clip_grad": 1e-3})
    backend.train(random_batch())
    prepared = backend.with_advantages(random_batch(seed=1))
    objective = _objective(backend)
    run_step(backend._context, objective, backend._trainable, prepared, prepared.schedule.steps[0], None)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            assert apply_update(backend._trainable)["train/grad_norm"] > 1e-3, "it was clipped"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in seen if "called a synchronizing" in str(w.message)]
    assert len(waits) <= 1, waits


def _objective(backend: Any) -> Any:
    from slime.training.step.loss import objective_of

    return objective_of(backend.args, backend._algorithm)


def test_the_fused_kernel_makes_the_steps_and_needs_no_copy(model: Path, make_backend: Callable[..., Any]) -> None:
    backend = make_backend(model, megatron=HALF)
    backend.train(random_batch())
    (optimizer,) = (inner.optimizer for inner in backend._trainable.inner)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(optimizer.state[p]["step"].is_cuda for p in parameters), "the fused kernel counts on the device"
    for p in parameters:
        p.grad = torch.randn_like(p)
    plain = [p.detach().double() for p in parameters]
    for p, before in zip(parameters, plain, strict=True):
        group = next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))
        beta1, beta2 = group["betas"]
        step = float(optimizer.state[p]["step"]) + 1
        first = beta1 * optimizer.state[p]["exp_avg"].double() + (1 - beta1) * p.grad.double()
        second = beta2 * optimizer.state[p]["exp_avg_sq"].double() + (1 - beta2) * p.grad.double() ** 2
        moved = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + group["eps"])
        before.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * moved)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    optimizer.step()
    peak = torch.cuda.max_memory_allocated() - start
    assert peak < sum(p.numel() for p in parameters), f"{peak} bytes on top for {len(parameters)} parameters"
    for p, want in zip(parameters, plain, strict=True):
        torch.testing.assert_close(p.double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "settings", [{}, OFFLOAD, PRECISE, {**OFFLOAD, **PRECISE}], ids=["fused", "offload", "precise", "both"]
)
def test_resume_equals_not_stopping_and_sleep_changes_no_bit(
    settings: dict[str, Any], model: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    """The state of the optimizer and the weights; a GPU's gradients may differ in their last bits."""
    backend = make_backend(model, megatron={**HALF, **settings})
    for seed in range(2):
        backend.train(random_batch(seed=seed))
    backend.save(tmp_path / "mid")
    backend.sleep()
    backend.wake()
    backend.save(tmp_path / "after")
    resumed = make_backend(model, megatron={**HALF, **settings})
    resumed.load(tmp_path / "mid")
    resumed.save(tmp_path / "again")
    for file in (tmp_path / "mid").glob("rank_*.safetensors"):
        for other in ("after", "again"):
            assert file.read_bytes() == (tmp_path / other / file.name).read_bytes(), other
    assert resumed.train(random_batch(seed=2))["train/grad_norm"] > 0


@pytest.mark.parametrize("block", [1000, 1 << 24])
def test_the_host_makes_the_steps_of_the_device(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks pass through two buffers while copies in both directions are under way."""
    monkeypatch.setattr("slime.training.step.adamw.BLOCK", block)
    torch.manual_seed(0)
    sizes = (100_003, 7, 50_000)
    weights = [torch.randn(size, device="cuda").to(torch.bfloat16) for size in sizes]
    grads = [[torch.randn(size, device="cuda") for size in sizes] for _ in range(4)]
    found = []
    for fraction in (0.0, 1.0):
        own = [w.clone() for w in weights]
        groups = [{"params": own, "lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}]
        optimizer = HeldAdamW(groups, Holding(host_fraction=fraction))
        for step in grads:
            for p, grad in zip(own, step, strict=True):
                p.decoupled_grad = grad.clone()  # type: ignore[attr-defined]
            optimizer.step()
            for p in own:
                p.decoupled_grad.zero_()  # type: ignore[attr-defined]
        state = optimizer.state[own[0]]
        assert state[EXP_AVG].is_pinned() == state[MASTER].is_pinned() == bool(fraction)
        found.append([optimizer.state[p][MASTER].cpu() for p in own])
        for p in own:
            assert torch.equal(p, optimizer.state[p][MASTER].to("cuda").to(torch.bfloat16))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_state_on_the_device_is_updated_without_a_wait() -> None:
    weights = [torch.randn(1000, device="cuda").to(torch.bfloat16)]
    groups = [{"params": weights, "lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}]
    optimizer = HeldAdamW(groups, Holding(torch.float16, torch.bfloat16, torch.bfloat16))
    for _ in range(2):
        weights[0].decoupled_grad = torch.randn(1000, device="cuda")  # type: ignore[attr-defined]
        with _no_waits():
            optimizer.step()
