"""Shared prefixes in real Megatron, float32: gradient, log-probs and training of a batch are those without sharing.

Over tensor-, context- and pipeline-parallel ranks and experts, real gloo, one process per rank. The reference is one
rank that computes every sample whole and by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from slime.algorithms import Algorithm
from slime.algorithms.whole_batch import BatchLogProbs, advantages_and_returns
from tests.support.experts import by_checkpoint_name
from tests.support.families import write_family
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training import agent_batch, training_args
from tests.support.training_ranks import Outcome, run_layouts

TOLERANCE = 1e-5
"""Relative to the largest entry of each tensor."""
WIDE_TOLERANCE = 1e-4
"""Of models with wide weights, where another order of the same samples alone is up to 1.2e-5 off."""
SHARED = {"use_prefix_sharing": True}
SCENARIOS: dict[str, dict[str, Any]] = {
    "four": {"args": {"micro_batch_size": 4, **SHARED}},
    "three": {"args": {"micro_batch_size": 3, **SHARED}},
    "by_tokens": {"args": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 100, **SHARED}},
    "reversed": {"order": list(reversed(range(12))), "args": {"micro_batch_size": 12, **SHARED}},
}
TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
CP = {"context_parallel_size": 2}
HEADS = {"cp_comm_type": "a2a"}
PP = {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, TP),
    "cp2": (2, CP),
    "cp2_a2a": (2, {**CP, **HEADS}),
    "sp2cp2": (4, {**SP, **CP}),
    "pp2cp2_a2a": (4, {**PP, **CP, **HEADS}),
    "pp2": (2, PP),
    "dp2": (2, {}),
    "recompute": (1, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    "recompute_core": (1, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}),
    "ep2": (2, EP),
    "sp2ep2": (2, {**SP, **EP}),
}
"""Ranks, and how they share a model."""
AGENTS = ("one", "cp2", "cp2_a2a", "sp2cp2", "pp2cp2_a2a")
STEPS: dict[str, Any] = {"global_batch_size": 6}
"""A round of two optimizer steps, the second with ratios other than one."""


def layout(name: str, **more: Any) -> dict[str, Any]:
    world_size, megatron = LAYOUTS[name]
    steps = {"rounds": 1, "round_args": {**STEPS, **SHARED, "micro_batch_size": 3}}
    return {"world_size": world_size, "megatron": megatron, "scenarios": SCENARIOS, **steps, **more}


def reference() -> dict[str, Any]:
    alone = {"micro_batch_size": 1}
    return layout("one", scenarios={"single": {"args": alone}}, round_args={**STEPS, **alone})


def run(
    ranks: Ranks, folder: Path, write: Callable[..., Path], family: str, layouts: dict[str, Any]
) -> dict[str, Outcome]:
    """The loss has a KL to another model, whose log-probs come from shared rows, too."""
    checkpoint, other = (write(folder / f"model{seed}", family, seed=seed, vocab_size=131) for seed in (0, 1))
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "ref_load": str(other)}
    kl["load"] = str(checkpoint)  # else training begins with the reference
    same = {"checkpoint": str(checkpoint), "forked": True, "provoke": False, "args": {"global_batch_size": 12, **kl}}
    return run_layouts(ranks, folder / "out", layouts, defaults=same)


def check(want: Outcome, got: Outcome, tolerance: float = TOLERANCE) -> None:
    for scenario, gradients in got.gradients.items():
        assert gradients.keys() == want.gradients["single"].keys()
        for name, gradient in want.gradients["single"].items():
            # Where terms cancel, as in a router's bias of 1e-7 among gradients of 1e-3, what is left is rounding.
            error = float((gradients[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-6))
            assert error <= tolerance, f"{scenario}: {name} differs by {error:.2e} of its largest entry"
    for a, b in zip(want.result["log_probs"], got.result["log_probs"], strict=True):
        assert np.abs(np.subtract(a, b)).max() <= tolerance
    (before,), (after,) = want.result["metrics"], got.result["metrics"]
    assert after["train/num_updates"] == 2.0 and abs(after["train/ppo_kl"]) > 1e-4
    assert after["train/kl_loss"] > 0.01, "the reference is the policy: its KL is not tested"
    assert 0.2 < after["train/shared_tokens"] < 0.6 and "train/shared_tokens" not in before
    for name in ("loss", "grad_norm", "entropy_loss", "ppo_kl", "kl_loss", "train_rollout_logprob_abs_diff"):
        assert after[f"train/{name}"] == pytest.approx(before[f"train/{name}"], rel=1e-4, abs=1e-6), name


QUICK, SLOW = (
    ("tp2",),
    ("one", "cp2", "cp2_a2a", "sp2cp2", "pp2", "pp2cp2_a2a", "dp2", "recompute", "recompute_core"),
)


@pytest.mark.slow
def test_a_dense_model_does_not_feel_what_is_shared(tmp_path: Path, ranks: Ranks) -> None:
    layouts = {"alone": reference(), **{name: layout(name) for name in QUICK}}
    got = run(ranks, tmp_path, write_tiny_model, "qwen3", layouts)
    for name in QUICK:
        check(got["alone"], got[name])


@pytest.mark.slow
def test_nor_in_layouts_of_several_kinds(tmp_path: Path, ranks: Ranks) -> None:
    layouts = {"alone": reference(), **{name: layout(name) for name in SLOW}}
    got = run(ranks, tmp_path, write_tiny_model, "qwen3", layouts)
    for name in SLOW:
        check(got["alone"], got[name])


@pytest.mark.slow
def test_an_agents_branches_train_like_each_branch_in_transformers(tmp_path: Path, ranks: Ranks) -> None:
    """Law: with forks at several depths, on one rank and on context-parallel ones, log-probs, loss and gradient are
    those of plain passes over every whole branch. A token that branches share has an advantage of its own in each."""
    checkpoint, batch = write_tiny_model(tmp_path / "model", "qwen3", vocab_size=131), agent_batch()
    settings: dict[str, Any] = {"advantage_estimator": "grpo_turn", "gamma": 0.9, "loss_aggregation": "token_mean"}
    settings |= {"global_batch_size": 4, **SHARED}
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    want, num_tokens = [], sum(s.num_tokens for s in batch.samples)
    for s in batch.samples:
        ids = torch.from_numpy(s.tokens).long()
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        want.append(log_probs[-s.response_length :])
    args = training_args(checkpoint, **settings)
    old = BatchLogProbs(tuple(x.detach().numpy() for x in want))
    found = advantages_and_returns(batch, args, Algorithm.of(args), old, None)
    advantages = [torch.from_numpy(a) for a in found.advantages]
    masks = [torch.from_numpy(s.loss_mask) for s in batch.samples]
    terms = [(-a * m * (x - x.detach()).exp()).sum() for x, a, m in zip(want, advantages, masks, strict=True)]
    loss = torch.stack(terms).sum() / sum(float(m.sum()) for m in masks)
    loss.backward()
    named = by_checkpoint_name((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)

    scenarios: dict[str, Any] = {
        "one_row": {"args": {"micro_batch_size": len(batch.samples)}},
        "by_tokens": {"args": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 90}},
        "three": {"args": {"micro_batch_size": 3}},
    }
    same = {"checkpoint": str(checkpoint), "forked": "agent", "provoke": False, "rounds": 1, "scenarios": scenarios}
    same |= {"args": settings, "round_args": scenarios["one_row"]["args"]}
    layouts = {name: dict(zip(("world_size", "megatron"), LAYOUTS[name], strict=True)) for name in AGENTS}
    for name, got in run_layouts(ranks, tmp_path / "out", layouts, defaults=same).items():
        for scenario, gradients in got.gradients.items():
            assert gradients.keys() == named.keys()
            for parameter, exact in named.items():
                error = float((gradients[parameter] - exact).abs().max() / exact.abs().max())
                assert error <= TOLERANCE, f"{name}, {scenario}: {parameter} differs by {error:.1e}"
        for a, b in zip(got.result["log_probs"], want, strict=True):
            assert np.abs(np.array(a) - b.detach().numpy()).max() <= TOLERANCE
        (metrics,) = got.result["metrics"]
        assert metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
        rows = _tree_size(batch.samples)
        assert metrics["train/shared_tokens"] == pytest.approx(1 - rows / num_tokens), "each is computed once"


def _tree_size(samples: Any) -> int:
    """The tokens of the groups' trees, and the last token of each sample that ends in an earlier one."""
    paths = [[(s.group_index, *s.tokens[:end].tolist()) for end in range(1, s.num_tokens + 1)] for s in samples]
    again = sum(any(own[-1] in before for before in paths[:i]) for i, own in enumerate(paths))
    return len({path for own in paths for path in own}) + again


@pytest.mark.slow
def test_a_critic_does_not_feel_what_is_shared(tmp_path: Path, ranks: Ranks) -> None:
    critic = {"global_batch_size": 12, "advantage_estimator": "ppo", "lambd": 0.9}
    layouts = {"alone": {**reference(), "args": critic}} | {n: {**layout(n), "args": critic} for n in ("one", "cp2")}
    got = run(ranks, tmp_path, write_tiny_model, "qwen3", layouts)
    (want,) = got["alone"].result["metrics"]
    values = {name for name in want if "value" in name or "critic" in name}
    assert values, "the critic says nothing"
    for outcome in (got["one"], got["cp2"]):
        (metrics,) = outcome.result["metrics"]
        assert {n: metrics[n] for n in values} == pytest.approx({n: want[n] for n in values}, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_experts_of_other_ranks_do_not_feel_what_is_shared(tmp_path: Path, ranks: Ranks) -> None:
    layouts = {"alone": reference(), "ep2": layout("ep2"), "sp2ep2": layout("sp2ep2")}
    got = run(ranks, tmp_path, write_tiny_model, "qwen3_moe", layouts)
    check(got["alone"], got["ep2"])
    check(got["alone"], got["sp2ep2"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3_moe", "minimax_m2", "gpt_oss", "glm4", "glm4_moe", "deepseek_v3"]
)
def test_no_family_feels_what_is_shared(family: str, tmp_path: Path, ranks: Ranks) -> None:
    layouts = {"alone": reference(), "one": layout("one"), "cp2": layout("cp2")}
    got = run(ranks, tmp_path, write_family, family, layouts)
    check(got["alone"], got["one"], WIDE_TOLERANCE)
    check(got["alone"], got["cp2"], WIDE_TOLERANCE)
