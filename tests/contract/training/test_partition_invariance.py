"""Law 3: the gradient does not depend on the partition. Real Megatron, real gloo, one process per rank.

Every layout also trains a round of two optimizer steps
(old log-probs from a forward pass, ratios other than one) and exports, so that gradient norms (a tied embedding counts
once), optimizer shards and the way back to Hugging Face names are compared. The loss has a KL to another model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import write_family
from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model
from tests.support.training_ranks import Outcome, run_layouts

TOLERANCE = 1e-5
"""Relative to the largest entry of each tensor, float32."""

TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
VP = {**PP, "virtual_pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
HEADS = {"cp_comm_type": "a2a"}
EP = {"expert_model_parallel_size": 2}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
OVERLAP = {"overlap_grad_reduce": True}

CUTS: dict[str, dict[str, Any]] = {
    "single": {"args": {"micro_batch_size": 1}},
    "four": {"args": {"micro_batch_size": 4}},
    "by_tokens": {"args": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 30}},
}
"""One sample per row, packed by samples, packed by tokens: micro-batches of every layout."""
ORDERS: dict[str, dict[str, Any]] = {
    **CUTS,
    "all_in_one": {"args": {"micro_batch_size": 8}},
    "balanced": {"args": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 30, "balance_data": True}},
    "reversed": {"order": list(reversed(range(8))), "args": {"micro_batch_size": 3}},
    "shuffled": {"order": [5, 2, 7, 0, 3, 6, 1, 4]},
    "chunks": {"args": {"log_probs_chunk_size": 3, "micro_batch_size": 8}},
}


def _layout(world_size: int, *settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"world_size": world_size, "megatron": {k: v for part in settings for k, v in part.items()}, **more}


DENSE: dict[str, dict[str, Any]] = {
    "one": _layout(1, scenarios=ORDERS),
    "dp2": _layout(2, OVERLAP, scenarios=ORDERS),
    "tp2": _layout(2, TP),
    "sp2": _layout(2, SP),
    "pp2": _layout(2, PP),
    "pp2_uneven": _layout(2, PP, {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}),
    "vp2": _layout(2, VP, OVERLAP),
    "cp2": _layout(2, CP),
    "cp2_a2a": _layout(2, CP, HEADS),
    "tp2pp2": _layout(4, SP, PP),
    "dp2pp2": _layout(4, PP, OVERLAP),
    "pp2cp2": _layout(4, PP, CP),
    "pp2cp2_a2a": _layout(4, PP, CP, HEADS),
}
EXPERTS: dict[str, dict[str, Any]] = {
    "one": _layout(1),
    "ep2": _layout(2, EP),
    "sp2ep2": _layout(2, SP, EP, ALL_TO_ALL),
    "pp2ep2": _layout(4, PP, EP, ALL_TO_ALL),
}
LINEAR: dict[str, dict[str, Any]] = {
    "one": _layout(1),
    "cp2": _layout(2, CP),
    "sp2cp2": _layout(4, SP, CP),
    "pp2cp2": _layout(4, PP, CP),
}
"""Linear attention, whose heads are split over tensor-, then over context-parallel ranks."""
SPARSE: dict[str, dict[str, Any]] = {
    "one": _layout(1),
    "cp2": _layout(2, CP),
    "sp2cp2": _layout(4, SP, CP),
    "pp2cp2": _layout(4, PP, CP),
}
"""Sparse attention, in which a rank selects from the keys of all context-parallel ranks."""
SIZES: tuple[tuple[int, int, int, int, int], ...] = (
    (1, 1, 1, 1, 1),
    (1, 2, 2, 2, 2),
    (2, 1, 2, 2, 1),
    (2, 2, 1, 1, 2),
    (4, 1, 1, 2, 2),
    (4, 2, 1, 1, 1),
    (4, 1, 2, 1, 2),
)
"""(DP, TP, PP, CP, EP): with the cuts above, every pair of values of any two."""
VALUES = ((1, 2, 4), (1, 2), (1, 2), (1, 2), (1, 2))


def _of_sizes(dp: int, tp: int, pp: int, cp: int, ep: int) -> dict[str, Any]:
    names = ("tensor_model", "pipeline_model", "context", "expert_model")
    sizes = {f"{name}_parallel_size": n for name, n in zip(names, (tp, pp, cp, ep), strict=True)}
    return _layout(dp * tp * pp * cp, sizes, {"sequence_parallel": tp > 1}, ALL_TO_ALL)


class Runs:
    """One model under layouts; each is run when it is first asked for."""

    def __init__(
        self,
        ranks: Ranks,
        root: Path,
        family: str,
        layouts: dict[str, dict[str, Any]],
        write: Callable[..., Path] = write_tiny_model,
        **model: Any,
    ) -> None:
        # A vocabulary that two ranks do not divide: the padded row must not matter.
        sizes = {"vocab_size": 131, "num_hidden_layers": 4}
        checkpoint = write(root / "model", family, **sizes, **model)
        reference = write(root / "reference", family, seed=1, **sizes, **model)
        kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "ref_load": str(reference)}
        kl["load"] = str(checkpoint)  # else training begins with the reference
        two_steps = {"global_batch_size": 4}
        same = {"checkpoint": str(checkpoint), "scenarios": CUTS, "rounds": 1, "args": kl, "round_args": two_steps}
        self._ranks, self._folder, self._defaults, self._layouts = ranks, root / "out", same, layouts
        self._outcomes: dict[str, Outcome] = {}

    def __getitem__(self, name: str) -> Outcome:
        if name not in self._outcomes:
            layout = {name: self._layouts[name]}
            self._outcomes |= run_layouts(self._ranks, self._folder, layout, defaults=self._defaults)
        return self._outcomes[name]


def _check_gradients(reference: dict[str, Any], other: Outcome, layout: str) -> None:
    assert max(float(g.abs().max()) for g in reference.values()) > 1e-2, "a gradient of zero proves nothing"
    for scenario, gradients in other.gradients.items():
        assert gradients.keys() == reference.keys()
        for name, want in reference.items():
            error = float((gradients[name] - want).abs().max() / want.abs().max().clamp_min(1e-12))
            assert error <= TOLERANCE, f"{layout}/{scenario}: {name} differs by {error:.2e} of its largest entry"


COMPARED = ("loss", "grad_norm", "entropy_loss", "ppo_kl", "ois", "train_rollout_logprob_abs_diff")
COMPARED_KL = ("kl_loss", "ref_log_probs")


def _check_training(one: Outcome, other: Outcome, layout: str) -> None:
    for want, got in zip(one.result["metrics"], other.result["metrics"], strict=True):
        assert got.keys() == want.keys(), layout
        assert want["train/num_updates"] == 2.0 and abs(want["train/ppo_kl"]) > 1e-4, "the second step has other ratios"
        assert want.get("train/kl_loss", 1.0) > 0.01, "the reference is the policy: its KL is not tested"
        for name in (f"train/{n}" for n in (*COMPARED, *COMPARED_KL) if n in COMPARED or f"train/{n}" in want):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), f"{layout}: {name}"
    for name, want in one.weights.items():
        # Adam divides by the gradient's own size, so rounding of a tiny gradient can show; lr is 1e-3.
        assert float((other.weights[name] - want).abs().max()) < 1e-4, f"{layout}: {name}"
    for want, got in zip(one.result["log_probs"], other.result["log_probs"], strict=True):
        assert got == pytest.approx(want, abs=1e-5), layout


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("dense"), "qwen3", DENSE, tied=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("untied"), "llama", DENSE)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("experts"), "qwen3_moe", EXPERTS)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Runs:
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    return Runs(ranks, tmp_path_factory.mktemp("linear"), "qwen3_next", LINEAR, write_family, **heads)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Runs:
    # Some samples see all keys, the first queries of others share theirs, and later ones gather them.
    folder = tmp_path_factory.mktemp("sparse")
    return Runs(ranks, folder, "glm_moe_dsa", SPARSE, write_family, index_topk=4)


@pytest.fixture(scope="module")
def covering(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Runs:
    layouts = {_name(sizes): _of_sizes(*sizes) for sizes in SIZES}
    return Runs(ranks, tmp_path_factory.mktemp("covering"), "qwen3_moe", layouts)


def _name(sizes: tuple[int, ...]) -> str:
    return "dp{}tp{}pp{}cp{}ep{}".format(*sizes)


def _check(runs: Runs, layout: str, one: str = "one") -> None:
    _check_gradients(runs[one].gradients["single"], runs[layout], layout)
    _check_training(runs[one], runs[layout], layout)


QUICK = ("one", "pp2")
"""The layout that quick tests of formulas, families and shared prefixes do not have; the others are slow."""


def _marked(layouts: Iterable[str]) -> list[Any]:
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in layouts]


@pytest.mark.parametrize("layout", _marked(DENSE))
def test_a_dense_model_does_not_feel_the_partition(dense: Runs, layout: str) -> None:
    _check(dense, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_do_not_feel_the_partition(experts: Runs, layout: str) -> None:
    _check(experts, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LINEAR)
def test_linear_attention_does_not_feel_the_partition(linear: Runs, layout: str) -> None:
    _check(linear, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", SPARSE)
def test_sparse_attention_does_not_feel_the_partition(sparse: Runs, layout: str) -> None:
    _check(sparse, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "vp2", "tp2pp2"])
def test_a_model_without_tied_embeddings_does_not_feel_the_partition(untied: Runs, layout: str) -> None:
    _check(untied, layout)


def test_the_layouts_cover_every_pair() -> None:
    for (i, first), (j, second) in itertools.combinations(enumerate(VALUES), 2):
        missing = set(itertools.product(first, second)) - {(sizes[i], sizes[j]) for sizes in SIZES}
        assert not missing, f"no layout has the sizes {missing} of {i} and {j}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", map(_name, SIZES))
def test_any_two_kinds_of_parallelism_go_together(covering: Runs, layout: str) -> None:
    _check(covering, layout, one=_name(SIZES[0]))


LOSSES: dict[str, dict[str, Any]] = {
    **{
        f"{loss}-{aggregation}": {"args": {"policy_loss": loss, "loss_aggregation": aggregation, "micro_batch_size": 3}}
        for loss in ("ppo_clip", "gspo", "cispo", "sapo", "dppo")
        for aggregation in ("sequence_mean", "token_mean", "sequence_sum", "constant_length")
    },
    "sft": {"args": {"loss_type": "sft_loss"}},
    "entropy": {"args": {"entropy_coef": 0.1}},
    "corrected": {
        "args": {
            **{"use_tis": True, "tis_level": "sequence", "tis_clip": 1.01, "micro_batch_size": 3},
            # Old log-probs of the trainer's own: from a forward pass, since there are two steps.
            **{"use_rollout_logprobs": False, "global_batch_size": 4},
        }
    },
}


EVERY = {**DENSE, **EXPERTS, "dp2tp2vp2": _layout(8, SP, VP), "dp2pp2cp2": _layout(8, PP, CP)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "names"), [("qwen3", ("one", "pp2cp2", "dp2tp2vp2", "dp2pp2cp2")), ("qwen3_moe", ("one", "pp2ep2"))]
)
def test_no_loss_and_no_aggregation_feels_the_partition(
    tmp_path: Path, ranks: Ranks, family: str, names: tuple[str, ...]
) -> None:
    same = {"scenarios": LOSSES, "rounds": 0, "args": {"use_rollout_logprobs": True}}
    layouts = {name: {**EVERY[name], **same} for name in names}
    outcomes = Runs(ranks, tmp_path, family, layouts, tied=family == "qwen3")
    for layout, scenario in itertools.product(layouts, LOSSES):
        only = Outcome({scenario: outcomes[layout].gradients[scenario]}, {}, {})
        _check_gradients(outcomes["one"].gradients[scenario], only, layout)


AGENT: dict[str, Any] = {"forked": "agent", "provoke": False, "round_args": {"global_batch_size": 2}}
"""Branches of executions with rewards at tokens. Executions have several samples, so two of them are a step."""
ESTIMATORS: dict[str, dict[str, Any]] = {
    "turns": {"advantage_estimator": "grpo_turn", "gamma": 0.9},
    "tokens": {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "loss_aggregation": "token_mean"},
    "whole": {"advantage_estimator": "grpo"},
}
"""Estimators that use rewards at tokens."""
ROWS: dict[str, dict[str, Any]] = {
    "packed": {"micro_batch_size": 7},
    "shared": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 120, "use_prefix_sharing": True},
}


def _rewarded(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    pairs = itertools.product(ESTIMATORS.items(), rows.items())
    return {f"{name}-{cut}": {"args": {**estimator, **row}} for (name, estimator), (cut, row) in pairs}


REWARDED: dict[str, dict[str, Any]] = {
    "one": _layout(1, scenarios=_rewarded({"single": {"micro_batch_size": 1}, **ROWS}), **AGENT),
    **{
        name: {**EVERY[name], **AGENT, "scenarios": _rewarded(ROWS)}
        for name in ("dp2", "sp2", "pp2", "cp2_a2a", "dp2pp2", "pp2cp2", "dp2pp2cp2")
    },
}


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("rewarded"), "qwen3", REWARDED, tied=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", REWARDED)
def test_rewards_at_tokens_do_not_feel_the_partition(rewarded: Runs, layout: str) -> None:
    """Law: nor whether the branches share their tokens."""
    for scenario, gradients in rewarded[layout].gradients.items():
        wanted = rewarded["one"].gradients[f"{scenario.split('-')[0]}-single"]
        _check_gradients(wanted, Outcome({scenario: gradients}, {}, {}), layout)
    # Gradients are compared above; Adam's first step magnifies the rounding of those that are nearly zero.
    _check_training(dataclasses.replace(rewarded["one"], weights={}), rewarded[layout], layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "names", "batch"),
    [
        ("qwen3", ("one", "dp2", "vp2", "tp2pp2", "pp2cp2"), {}),
        ("llama", ("one", "tp2pp2"), {}),
        ("qwen3", ("one", "dp2", "tp2pp2", "pp2cp2"), AGENT),
    ],
    ids=["tied", "untied", "rewards_at_tokens"],
)
def test_a_critic_does_not_feel_the_partition(
    tmp_path: Path, ranks: Ranks, family: str, names: tuple[str, ...], batch: dict[str, Any]
) -> None:
    settings = {"advantage_estimator": "ppo", "lambd": 0.9}
    layouts = {name: {**DENSE[name], "scenarios": CUTS, "args": settings, **batch} for name in names}
    outcomes = Runs(ranks, tmp_path, family, layouts, tied=family == "qwen3")
    critic = {name for name in outcomes["one"].result["metrics"][0] if "value" in name or "critic" in name}
    assert critic, "the critic says nothing"
    for layout in layouts:
        _check(outcomes, layout)
        for want, got in zip(outcomes["one"].result["metrics"], outcomes[layout].result["metrics"], strict=True):
            assert {n: got[n] for n in critic} == pytest.approx({n: want[n] for n in critic}, rel=1e-3, abs=1e-5)


SOME = _marked(["one", "pp2", "tp2pp2", "pp2cp2"])


@pytest.mark.parametrize("layout", SOME)
@pytest.mark.parametrize("kind", ["non_finite", "gap"])
def test_every_rank_raises_the_same_error(dense: Runs, kind: str, layout: str) -> None:
    errors = dense[layout].errors[kind]
    assert len(errors) == DENSE[layout]["world_size"], f"{layout}: ranks without an error"
    assert len(set(errors)) == 1, f"{layout}: {errors}"
    assert "sample 3 of group 1" in errors[0], f"{layout}: {errors[0]}"


@pytest.mark.parametrize("layout", [*SOME, *_marked(["dp2pp2"])])
def test_a_mistake_of_the_user_on_one_rank_ends_all_at_once(dense: Runs, layout: str) -> None:
    """Nobody waits for the rank that failed until a deadline."""
    errors = dense[layout].errors["hook"]
    assert len(errors) == DENSE[layout]["world_size"], f"{layout}: ranks without an error"
    assert all("a mistake of the user" in error for error in errors), f"{layout}: {errors}"
