"""The fused ops on a GPU: as near to float64 as plain PyTorch in the same dtype, in value and gradient.

python -m pytest tests/gpu/test_ops_on_gpu.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.ops import attention, norm, qk_rotary, select, swiglu
from slime.ops.repeats import Repeats, repeated
from tests.gpu.conftest import Figure
from tests.support.families import write_family
from tests.support.training_ranks import run_on_cpu_and_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TIMES = 1.5
"""How many times the error of plain PyTorch in the same dtype a fused op may have (norm of the difference to float64,
relative to its norm), beyond `FLOOR`."""
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}
"""Half a step of the last digit, about: what rounding the result costs at the least."""
Formula = Callable[..., tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    before = dict(select._chosen)
    select.use(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, "fused")
    yield
    select._chosen.clear()
    select._chosen.update(before)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def value_and_gradients(formula: Formula, inputs: list[Tensor], frozen: int) -> list[Tensor]:
    """The last `frozen` inputs need no gradient."""
    leaves = [x.clone().requires_grad_(i < len(inputs) - frozen) for i, x in enumerate(inputs)]
    outs = formula(*leaves)
    grads = [draw(*out.shape, seed=9).to(out) for out in outs]
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, trained, grads)]


def require_near(op: Formula, plain: Formula, inputs: list[Tensor], dtype: torch.dtype, *, frozen: int = 0) -> None:
    """`inputs` are float64 on the host, `plain` is computed in float64 and in `dtype`, `op` in `dtype`."""
    half = [x.to(dtype).cuda() for x in inputs]
    exact = value_and_gradients(plain, [x.double() for x in half], frozen)
    for number, (a, b, want) in enumerate(
        zip(value_and_gradients(op, half, frozen), value_and_gradients(plain, half, frozen), exact, strict=True)
    ):
        assert a.shape == want.shape and a.dtype == b.dtype, f"output {number}"
        assert bool(a.isfinite().all()), f"output {number} is not finite"
        fused_error, plain_error = (float((x.double() - want).norm() / (want.norm() + 1e-300)) for x in (a, b))
        limit = TIMES * plain_error + FLOOR[dtype]
        assert fused_error <= limit, f"output {number}: fused is off by {fused_error:.1e}, plain by {plain_error:.1e}"


def exact_norm(x: Tensor, weight: Tensor, zero_centered: bool) -> Tensor:
    """The reference, but for float64, which it would compute in float32."""
    if x.dtype != torch.float64:
        return norm.reference(x, weight, 1e-6, zero_centered=zero_centered)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normed * (1 + weight if zero_centered else weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    "shape", [(0, 64), (1, 1024), (3, 7), (777, 128), (5000, 2560), (33, 8192), (2, 20000), (70, 3, 96)]
)
@pytest.mark.parametrize("frozen", [0, 1])
def test_norm(shape: tuple[int, ...], zero_centered: bool, dtype: torch.dtype, frozen: int) -> None:
    op = lambda x, w: (norm.rms_norm(x, w, 1e-6, zero_centered=zero_centered),)  # noqa: E731
    plain = lambda x, w: (exact_norm(x, w, zero_centered),)  # noqa: E731
    require_near(op, plain, [draw(*shape), draw(shape[-1], seed=1)], dtype, frozen=frozen)


def test_norm_of_a_view() -> None:
    """Rows that lie apart, and a gradient that is expanded."""
    op = lambda x, w: (norm.rms_norm(x[:, :96], w, 1e-6).sum(0, keepdim=True).expand(2, -1),)  # noqa: E731
    plain = lambda x, w: (exact_norm(x[:, :96], w, False).sum(0, keepdim=True).expand(2, -1),)  # noqa: E731
    require_near(op, plain, [draw(50, 160), draw(96, seed=1)], torch.float32)


def test_the_same_input_gives_the_same_bits() -> None:
    x, w = draw(4000, 1024).bfloat16().cuda(), draw(1024, seed=1).bfloat16().cuda()
    op = lambda x, w: (norm.rms_norm(x, w, 1e-6),)  # noqa: E731
    first, second = (value_and_gradients(op, [x, w], 0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 8), (1, 6), (3, 1, 2 * 9728), (4097, 3072), (2, 2 * 40001)])
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    require_near(lambda x: (swiglu.swiglu(x),), lambda x: (swiglu.reference(x),), [3 * draw(*shape)], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "heads", "per_group", "pairs", "normed"),
    [
        (0, qk_rotary.Heads(2, 64), 2, 32, True),
        (1, qk_rotary.Heads(8, 128), 2, 64, True),
        (3001, qk_rotary.Heads(8, 128), 4, 64, True),
        (500, qk_rotary.Heads(3, 64, zero_centered=True), 3, 8, True),
        (129, qk_rotary.Heads(2, 128, interleaved=True), 16, 32, False),
        (2000, qk_rotary.Heads(1, 64), 12, 32, False),
        (77, qk_rotary.Heads(5, 80, interleaved=True), 1, 20, True),
        (64, qk_rotary.Heads(2, 256), 8, 128, True),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_heads(
    num_tokens: int, heads: qk_rotary.Heads, per_group: int, pairs: int, normed: bool, dtype: torch.dtype, frozen: bool
) -> None:
    width = heads.groups * (per_group + 2) * heads.size
    angles = (draw(num_tokens, pairs, seed=3) * 1000).float().cuda()
    weights = [1 + draw(heads.size, seed=seed) / 4 for seed in (1, 2)] if normed else []

    def plain(mixed: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        """The reference with norms that know float64."""
        grouped = mixed.unflatten(-1, (heads.groups, -1, heads.size))
        query, key, value = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
        if own:
            query, key = (exact_norm(x, w, heads.zero_centered) for x, w in zip((query, key), own, strict=True))
        # in float64 the angles' own cos and sin, as the kernel has them, not rounded to the dtype of the model
        return *(
            qk_rotary.rotate(x, angles.cos(), angles.sin(), interleaved=heads.interleaved) for x in (query, key)
        ), value

    def op(mixed: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        q_weight, k_weight = own if own else (None, None)
        return qk_rotary.split_and_rotate(mixed, heads, angles.cos(), angles.sin(), q_weight, k_weight)

    require_near(op, plain, [draw(num_tokens, width), *weights], dtype, frozen=len(weights) if frozen else 0)


FORMS = (attention.flash, attention.varlen, attention.flash4)


def require_form(form: Any) -> None:
    reasons = attention.flash4_problems(torch.device("cuda"), torch.bfloat16) if form is attention.flash4 else ()
    if "flash-attn-4 is not installed" in reasons:
        pytest.skip(reasons[0])
    assert not reasons, reasons


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("lengths", "ahead", "heads", "groups", "size"),
    [
        ((1,), (0,), 4, 4, 64),
        ((300, 7, 64, 1, 129), (0, 0, 0, 0, 0), 16, 8, 128),
        ((5, 2000), (100, 0), 32, 8, 128),
        ((33, 33), (0, 33), 6, 2, 64),
    ],
)
def test_attention(
    form: Any, lengths: tuple[int, ...], ahead: tuple[int, ...], heads: int, groups: int, size: int
) -> None:
    """Grouped queries, more keys than queries, and values that are a view of a wider projection."""
    require_form(form)
    keys = tuple(n + m for n, m in zip(lengths, ahead, strict=True))
    cu_query, cu_key = (torch.tensor([0, *x]).cumsum(0).int().cuda() for x in (lengths, keys))

    def op(query: Tensor, key_value: Tensor) -> tuple[Tensor]:
        key, value = key_value.unbind(2)
        return (form(query, key, value, cu_query, cu_key, max(lengths), max(keys)),)

    def plain(query: Tensor, key_value: Tensor) -> tuple[Tensor]:
        key, value = key_value.unbind(2)
        return (attention.per_sequence(query, key, value, lengths, keys),)

    inputs = [draw(sum(lengths), heads, size), draw(sum(keys), groups, 2, size, seed=1)]
    require_near(op, plain, inputs, torch.bfloat16)


def test_attention_with_smaller_values() -> None:
    """Latent attention: queries and keys have 192 entries, values 128."""
    require_form(attention.flash4)
    ends = torch.tensor([0, 300, 307], dtype=torch.int32, device="cuda")

    def op(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor]:
        return (attention.flash4(query, key, value, ends, ends, 300, 300, scale=0.1),)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor]:
        return (attention.per_sequence(query, key, value, (300, 7), (300, 7), scale=0.1),)

    inputs = [draw(307, 8, 192), draw(307, 8, 192, seed=1), draw(307, 8, 128, seed=2)]
    require_near(op, plain, inputs, torch.bfloat16)


def test_a_deterministic_backward_pass_of_attention_is_repeatable() -> None:
    require_form(attention.flash4)
    ends = torch.tensor([0, 4096], dtype=torch.int32, device="cuda")
    inputs = [draw(4096, heads, 128, seed=heads).bfloat16().cuda().requires_grad_() for heads in (16, 4)]
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(5):
            out = attention.flash4(inputs[0], inputs[1], inputs[1], ends, ends, 4096, 4096)
            found.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(again, found[0], strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_attention_behind_shared_prefixes(form: Any) -> None:
    """Copies of keys are made again for the backward pass, and the gradients of the copies are summed."""
    require_form(form)
    seen = [np.arange(700), *(np.r_[0:500, start:end] for start, end in ((700, 764), (764, 765), (765, 900)))]
    lengths, keys = (700, 64, 1, 135), tuple(map(len, seen))
    arrays = Repeats.arrays(np.concatenate(seen), sum(lengths))
    repeats = Repeats.of({name: torch.from_numpy(array).cuda() for name, array in arrays.items()})
    cu_query, cu_key = (torch.tensor([0, *x]).cumsum(0).int().cuda() for x in (lengths, keys))

    def op(query: Tensor, key_value: Tensor) -> tuple[Tensor]:
        with repeated(key_value.unbind(2), repeats) as (key, value):
            return (form(query, key, value, cu_query, cu_key, max(lengths), max(keys)),)

    def plain(query: Tensor, key_value: Tensor) -> tuple[Tensor]:
        key, value = key_value.index_select(0, repeats.rows).unbind(2)
        return (attention.per_sequence(query, key, value, lengths, keys),)

    inputs = [draw(sum(lengths), 16, 128), draw(sum(lengths), 8, 2, 128, seed=1)]
    require_near(op, plain, inputs, torch.bfloat16)


def test_a_trainer_with_shared_prefixes_is_one_without(tmp_path: Path, figure: Figure) -> None:
    """Law: in float32 gradients and log-probs are those of whole samples on a CPU, in bfloat16 as near to them."""
    checkpoint = write_family(tmp_path / "model", "qwen3", head_dim=64)
    shared = {"device": "cuda", "global_batch_size": 12, "micro_batch_size": 4, "use_prefix_sharing": True}
    devices: dict[str, dict[str, Any]] = {
        "cpu": {"args": {"device": "cpu", "global_batch_size": 12}},
        "gpu": {"args": shared},
        "half_whole": {"args": {**shared, "use_prefix_sharing": False}, "megatron": {"bf16": True}},
        "half_shared": {"args": shared, "megatron": {"bf16": True}},
    }
    far = run_on_cpu_and_gpu(
        tmp_path, checkpoint, {name: {**own, "forked": True} for name, own in devices.items()}, figure
    )
    assert far["half_shared"] < 2 * far["half_whole"] + 1e-3


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "glm4", "glm4_moe", "minimax_m2", "gpt_oss"])
def test_a_trainer_with_kernels_is_one_without(tmp_path: Path, family: str, figure: Figure) -> None:
    """Law: the whole model, with its gradients, in float32 as on a CPU; in bfloat16 as near to it as plain PyTorch."""
    checkpoint = write_family(tmp_path / "model", family, head_dim=64)
    devices: dict[str, dict[str, Any]] = {
        "cpu": {"args": {"device": "cpu"}},
        "gpu": {"args": {"device": "cuda"}},
        "half_plain": {"args": {"device": "cuda", "kernels": "reference"}, "megatron": {"bf16": True}},
        "half_fused": {"args": {"device": "cuda", "kernels": "fused"}, "megatron": {"bf16": True}},
    }
    far = run_on_cpu_and_gpu(tmp_path, checkpoint, devices, figure)
    plain, kernels = far["half_plain"], far["half_fused"]
    assert kernels < 2 * plain + 1e-3, f"kernels are off by {kernels:.1e} on average, plain PyTorch by {plain:.1e}"
