"""`--true-on-policy` on one GPU: an operation gives a token the same bits in any batch, and an engine with CUDA graphs
has the log-probs of the trainer, bit for bit.

python -m pytest tests/gpu/test_true_on_policy_on_gpu.py
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from slime.core.routed_experts import ExpertFormat
from slime.ops import experts, invariant, select
from tests.gpu.conftest import Figure
from tests.support.engine_parity import one_rank, sampled
from tests.support.engines import serving, spec_of
from tests.support.families import write_family

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(400)]
LENGTHS = [1000, 37, 513, 64]
ROWS = [*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 256, 333, 1000]
SHAPES = [
    (128, 2048),
    (6144, 2560),
    (2560, 9728),
    (1024, 3072),
    (4096, 14336),
    (1536, 4096),
    (576, 1536),
    (50304, 1024),
]
"""(outputs, inputs) of layers. cuBLAS by itself splits the sums of most of them for few rows."""


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Invariant kernels, and PyTorch's settings again for the tests that follow in this process."""
    select.use(torch.device("cuda"), torch.bfloat16, invariant=True)
    yield
    select.use(torch.device("cuda"), torch.bfloat16)
    torch.backends.cuda.preferred_blas_library("default")
    for name in ("bf16", "fp16"):
        setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", (True, True))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_of_a_product_does_not_depend_on_the_others(shape: tuple[int, int]) -> None:
    weight, x = draw(*shape) * shape[1] ** -0.5, draw(4096, shape[1])
    whole = torch.mm(x, weight.t())
    exact = x[:64].double() @ weight.double().t()
    assert float((whole[:64] - exact).norm() / exact.norm()) < 4e-3
    for num in ROWS:
        assert torch.equal(invariant.linear(x[:num], weight), whole[:num]), num
    assert torch.equal(torch.mm(x[7:1031], weight.t()), whole[7:1031])


@pytest.mark.parametrize(("heads", "groups", "size"), [(32, 8, 128), (16, 8, 128), (9, 3, 64), (4, 2, 16)])
def test_attention_of_a_token_is_that_of_a_packed_row_in_decode_and_prefill(heads: int, groups: int, size: int) -> None:
    from slime.ops.kernels.invariant import attend

    cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], device="cuda", dtype=torch.int32)
    num = sum(LENGTHS)
    query, key, value = (draw(num, n, size) for n in (heads, groups, groups))
    whole = invariant.attend(query, key, value, (cu, cu), (LENGTHS, LENGTHS))
    slots = torch.randperm(num + 50, device="cuda")[:num]
    keys, values = (torch.full((num + 50, groups, size), 9.0, device="cuda").bfloat16() for _ in range(2))
    keys[slots], values[slots] = key, value
    asked = [(int(start) + at, int(start)) for start, n in zip(cu, LENGTHS, strict=False) for at in range(0, n, 53)]
    rows = torch.tensor([row for row, _ in asked], device="cuda")
    starts = torch.tensor([0, *itertools.accumulate(row + 1 - start for row, start in asked)], device="cuda")
    cached = torch.cat([slots[start : row + 1] for row, start in asked])
    out = torch.empty(len(asked), heads, size, device="cuda", dtype=torch.bfloat16)
    ones = torch.arange(len(asked) + 1, device="cuda", dtype=torch.int32)
    attend(query[rows], keys, values, out, ones, None, 1, size**-0.5, cache=(keys, values, starts.int(), cached))
    assert torch.equal(out, whole[rows])
    for prefix in (1, 63, 64, 100, 700):
        own = slice(prefix, LENGTHS[0])
        out = torch.empty_like(query[own])
        span = torch.tensor([0, LENGTHS[0] - prefix], device="cuda")
        cache = keys, values, torch.tensor([0, prefix], device="cuda", dtype=torch.int32), slots[:prefix]
        attend(query[own], key[own], value[own], out, span, span, len(out), size**-0.5, cache=cache)
        assert torch.equal(out, whole[own]), prefix


def test_attention_and_its_gradients_are_as_exact_as_flash_attention(figure: Figure) -> None:
    from slime.ops.attention import flash, per_sequence

    cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], device="cuda", dtype=torch.int32)
    leaves = [draw(sum(LENGTHS), n, 128).requires_grad_() for n in (16, 8, 8)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    longest = max(LENGTHS)
    forms = {
        "ours": (invariant.attend(*leaves, (cu, cu), (LENGTHS, LENGTHS)), leaves),
        "flash": (flash(*leaves, cu, cu, longest, longest), leaves),
        "exact": (per_sequence(*wide, LENGTHS, LENGTHS), wide),
    }
    above = draw(*forms["ours"][0].shape)
    found = {name: [x, *torch.autograd.grad(x, given, above.to(x.dtype))] for name, (x, given) in forms.items()}
    for name, ours, flashs, exact in zip(("out", "q", "k", "v"), *found.values(), strict=True):
        error, limit = (float((x - exact).norm() / exact.norm()) for x in (ours, flashs))
        figure(f"error of {name} / FlashAttention's", error / limit)
        assert error < 1.1 * limit, name


def test_log_probs_of_a_row_do_not_depend_on_the_others() -> None:
    logits, temperatures = 3 * draw(1000, 50257), torch.linspace(0.3, 1.7, 1000, device="cuda")
    whole = invariant.log_softmax(logits, temperatures)
    exact = torch.log_softmax(logits.double() / temperatures.double().unsqueeze(1), dim=-1)
    assert float((whole - exact).abs().max()) < 1e-4
    for num in (1, 3, 64, 999):
        assert torch.equal(invariant.log_softmax(logits[:num], temperatures[:num]), whole[:num])


def test_a_row_of_experts_does_not_depend_on_the_others() -> None:
    weights = draw(16, 512, 256) / 16, draw(16, 256, 256) / 16
    scores, x = torch.randn(4096, 16, device="cuda").softmax(-1), draw(4096, 256)
    chosen = scores.topk(4, dim=-1).indices

    def mix(rows: slice) -> torch.Tensor:
        weighed = experts.weigh(scores[rows], chosen[rows], torch.bfloat16, share=True, scale=1.0)
        return experts.mix(x[rows], *weighed, 4, weights)

    whole = mix(slice(None))
    for first, num in [(0, 1), (5, 2), (9, 17), (100, 64), (7, 300), (2048, 2048)]:
        assert torch.equal(mix(slice(first, first + num)), whole[first : first + num]), (first, num)
    gates = [functional.linear(x[3], weights[0][expert]).chunk(2) for expert in chosen[3].tolist()]
    outs = [
        functional.linear(functional.silu(gate) * up, weights[1][expert])
        for (gate, up), expert in zip(gates, chosen[3].tolist(), strict=True)
    ]
    shares = scores[3, chosen[3]] / scores[3, chosen[3]].sum()
    wanted = (shares.unsqueeze(1) * torch.stack(outs).float()).sum(0)
    assert torch.allclose(whole[3].float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_an_engines_log_probs_are_those_of_the_trainer(family: str, temperature: float, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 2048}
    routed = ExpertFormat(16, 4, (True,) * 4) if family == "qwen3_moe" else None
    if routed is not None:
        sizes |= {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "mlp_only_layers": []}
    checkpoint = write_family(tmp_path / "model", family, **sizes)
    extra = {
        **{"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"},
        **{"mem_fraction_static": 0.2, "max_total_tokens": 32768, "cuda_graph_max_bs": 32},
        **({} if routed is None else {"enable_return_routed_experts": True}),
    }
    spec = spec_of(checkpoint, dtype="bfloat16", device="cuda", extra=extra)
    with serving(dataclasses.replace(spec, trainer_kernels="auto"), tmp_path) as server:
        batch = sampled(server.url, temperature=temperature, length=300, experts=routed)
    settings: dict[str, Any] = {"global_batch_size": 24, "micro_batch_size": 5, "rollout_temperature": temperature}
    settings["use_rollout_routing_replay"] = routed is not None
    with one_rank(checkpoint, device="cuda", megatron={"bf16": True}, true_on_policy=True, **settings) as backend:
        got = np.concatenate([np.asarray(values) for values in backend.log_probs(batch)])
    by_engine = np.concatenate([np.asarray(s.rollout_log_probs) for s in batch.samples])
    assert len(got) == 24 * 300 and np.ptp(by_engine) > 0.5
    assert float(np.abs(got - by_engine).max()) == 0.0
