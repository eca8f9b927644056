"""Adapters: their gradients are those of the weight that they change, whatever the layout, and a merged export is the
model that was trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.core.errors import CheckpointError, ConfigError
from slime.training.model.trained import LINEAR
from slime.weights.hf_shards import load_shard
from tests.support.adapters import fill_b
from tests.support.families import FAMILIES, write_family
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch
from tests.support.training_ranks import Outcome, run_layouts

RANK = 4
LORA: dict[str, Any] = {"lora_rank": RANK, "lora_alpha": 6.0}
ADAPTED = {"gpt_oss": ("self_attention",)}
"""Of families in which not every linear layer can have adapters."""
SCALE = 1.5


def _tensors(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.iter_hf_tensors()}


def _local(backend: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in backend.model.shards.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_untrained_adapter_changes_no_bit_and_a_trained_one_only_itself(
    family: str, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    model, batch = write_tiny_model(tmp_path / "model", family), random_batch()
    plain = make_backend(model)
    want, before = plain.log_probs(batch), _tensors(plain)
    backend = make_backend(model, **LORA)
    assert all((a == b).all() for a, b in zip(backend.log_probs(batch), want, strict=True))
    start = _local(backend)
    linears = {n for n in start if LINEAR.search(n)}
    own = {n.removesuffix("weight") + part for n in linears for part in ("lora_a", "lora_b")}
    assert own and start.keys() == before_names(plain.table) | own
    for _ in range(3):
        assert backend.train(batch)["train/grad_norm"] > 0
    end = _local(backend)
    assert {n for n in end if not torch.equal(end[n], start[n])} <= own
    unused = {n for n in own if torch.equal(end[n], start[n])}
    assert family == "qwen3_moe" or not unused, f"untrained: {unused}"
    after = _tensors(backend)
    assert after.keys() == before.keys(), "adapters are no tensors of an export"
    assert not torch.equal(
        after["model.layers.0.self_attn.q_proj.weight"], before["model.layers.0.self_attn.q_proj.weight"]
    )
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])


def before_names(table: Any) -> set[str]:
    return set(table.megatron_names)


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "qwen3")]
)
def test_gradients_are_those_of_the_merged_weight(
    family: str, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    """dL/db = scale * dL/dW a^T and dL/da = scale * b^T dL/dW, with dL/dW of the exported model, trained whole."""
    model, batch = write_family(tmp_path / "model", family), random_batch()
    backend = make_backend(model, **LORA, lora_target_modules=ADAPTED.get(family))
    fill_b(backend)
    table = backend.model.table
    log_probs, gradients, own = backend.log_probs(batch), backend.gradients(batch), _local(backend)
    assert gradients.keys() == {n for n in own if "lora_" in n}
    starts = [tensor for n, tensor in own.items() if n.endswith("lora_a")]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(starts, 2)), "two adapters start alike"
    backend.save_hf(tmp_path / "merged")
    whole = make_backend(tmp_path / "merged")
    for got, want in zip(whole.log_probs(batch), log_probs, strict=True):
        assert abs(got - want).max() < 1e-5, "the merged model is another one"
    full = whole.gradients(batch)
    for name in (n for n in own if n.endswith("lora_a")):
        stem = name.removesuffix("lora_a")
        dw = load_shard(whole.table, stem + "weight", full.__getitem__, tp_rank=0, tp_size=1).double()
        a, b = own[stem + "lora_a"].double(), own[stem + "lora_b"].double()
        for part, want in (("lora_a", SCALE * b.T @ dw), ("lora_b", SCALE * dw @ a.T)):
            got = load_shard(table, stem + part, gradients.__getitem__, tp_rank=0, tp_size=1).double()
            error = (got - want).abs().max() / want.abs().max().clamp_min(1e-9)
            assert error < 1e-4, f"{stem}{part} differs by {float(error):.1e}"


def test_patterns_choose_layers_by_either_name(tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    model = write_tiny_model(tmp_path / "model", "qwen3_moe")
    chosen = make_backend(model, lora_rank=2, lora_target_modules=(r"layers\.0\..*qkv", r"layers.1.mlp.experts.1.up"))
    names = {n.rpartition(".")[0] for n in chosen.model.shards if "lora_" in n}
    experts = {f"decoder.layers.1.mlp.experts.local_experts.{i}.linear_fc1" for i in range(4)}
    assert names == {"decoder.layers.0.self_attention.linear_qkv"} | experts, "the experts of a layer go together"
    with pytest.raises(ConfigError, match=r"'lm_head'.*does not match any linear layer"):
        make_backend(model, lora_rank=2, lora_target_modules=("lm_head",))


@pytest.mark.slow
def test_resume_equals_not_stopping(tmp_path: Path, tiny_qwen3: Path, make_backend: Callable[..., Any]) -> None:
    batches = [random_batch(seed=s) for s in range(4)]
    first = make_backend(tiny_qwen3, **LORA)
    for batch in batches[:2]:
        first.train(batch)
    first.save(tmp_path / "mid")
    metrics = [first.train(batch) for batch in batches[2:]]
    end = _local(first)
    again = make_backend(tiny_qwen3, **LORA)
    again.load(tmp_path / "mid")
    assert [again.train(batch) for batch in batches[2:]] == metrics
    assert all(torch.equal(tensor, end[name]) for name, tensor in _local(again).items())


@pytest.mark.parametrize(
    "other",
    [{}, {**LORA, "lora_alpha": 8.0}, {**LORA, "lora_target_modules": ("qkv",)}, {**LORA, "lora_rank": 2}],
    ids=str,
)
@pytest.mark.slow
def test_other_adapters_are_refused(
    other: dict[str, Any], tmp_path: Path, tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    make_backend(tiny_qwen3, **LORA).save(tmp_path / "mid")
    with pytest.raises(CheckpointError, match="settings of the run that saved"):
        make_backend(tiny_qwen3, **other).load(tmp_path / "mid")


@pytest.mark.slow
def test_a_reference_of_the_base_costs_a_copy_of_the_adapters(
    tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    batch = random_batch()
    backend = make_backend(tiny_qwen3, **LORA, use_kl_loss=True, kl_loss_coef=0.1, ref_load=str(tiny_qwen3))
    base = sum(float(x.sum()) for x in backend.log_probs(batch))
    assert set(backend._others._host._policies["reference"]) == {n for n in backend.model.shards if "lora_" in n}
    for _ in range(2):
        metrics = backend.train(batch)
    mean = metrics["train/ref_log_probs"]
    fresh = make_backend(tiny_qwen3, use_kl_loss=True, kl_loss_coef=0.1, ref_load=str(tiny_qwen3))
    assert fresh.train(batch)["train/ref_log_probs"] == mean and base != 0


def _layout(world_size: int, **sizes: Any) -> dict[str, Any]:
    return {"world_size": world_size, "megatron": sizes}


TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
DENSE = {"one": _layout(1), "sp2": _layout(2, **SP)}
MORE = {
    "one": _layout(1),
    "tp2": _layout(2, **TP),
    "pp2": _layout(2, **PP),
    "dp2": _layout(2, overlap_grad_reduce=True),
    "tp2pp2": _layout(4, **SP, **PP),
}
EXPERTS = {
    "one": _layout(1),
    "ep2": _layout(2, **EP),
    "sp2": _layout(2, **SP),
    "sp2ep2": _layout(2, **SP, **EP),
    "pp2ep2": _layout(4, **PP, **EP),
}

SHARDS = {name: EXPERTS[name] for name in ("one", "sp2", "sp2ep2")}


def _check(one: Outcome, other: Outcome, layout: str) -> None:
    want, got = one.gradients["packed"], other.gradients["packed"]
    assert got.keys() == want.keys() and any("lora_a" in n for n in want), layout
    for name, gradient in want.items():
        error = float((got[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-12))
        assert error <= 1e-5, f"{layout}: {name} differs by {error:.1e} of its largest entry"
    for before, after in zip(one.result["metrics"], other.result["metrics"], strict=True):
        assert after["train/grad_norm"] == pytest.approx(before["train/grad_norm"], rel=1e-5), layout
    for name, tensor in one.weights.items():
        assert float((other.weights[name] - tensor).abs().max()) < 1e-5, f"{layout}: {name} as merged"


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("qwen3", DENSE),
        ("llama", MORE),
        ("qwen3_moe", EXPERTS),
        ("qwen3_next", SHARDS),
        ("deepseek_v3", SHARDS),
    ],
    ids=["dense", "more", "experts", "delta", "latent"],
)
@pytest.mark.slow
def test_no_adapter_feels_the_partition(family: str, layouts: dict[str, Any], tmp_path: Path, ranks: Ranks) -> None:
    if layouts is SHARDS:
        checkpoint = write_family(tmp_path / "model", family)
    else:
        checkpoint = write_tiny_model(tmp_path / "model", family, vocab_size=131, num_hidden_layers=2)
    scenario = {"packed": {"args": {"micro_batch_size": 4}}}
    defaults = {"checkpoint": str(checkpoint), "scenarios": scenario, "rounds": 2, "args": LORA}
    outcomes = run_layouts(ranks, tmp_path / "out", layouts, defaults=defaults)
    for layout, outcome in outcomes.items():
        _check(outcomes["one"], outcome, layout)
