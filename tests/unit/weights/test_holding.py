"""Laws of what each rank of an engine holds, for every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.core.engine_interface import RankChecksums
from slime.core.errors import ConfigError, WeightSyncError
from slime.core.topology import ONE_RANK, EngineLayout, EngineRank
from slime.models import layout_problem
from slime.models.common.table import FamilyTable
from slime.serving.payloads import digest
from slime.weights.engine_layout import ExpectedDigests
from slime.weights.holding import hf_names_held
from slime.weights.sync import require_equal
from tests.support.weights import CONFIG, State, engine_tensors, model

MOE = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32}
STAGES = EngineLayout(pp_size=2)
EXPERTS = EngineLayout(tp_size=4, ep_size=2)
GROUPS = EngineLayout(tp_size=2, dp_size=2)


def held(table: FamilyTable, state: State, layout: EngineLayout) -> dict[EngineRank, dict[str, torch.Tensor]]:
    return {rank: dict(engine_tensors(table, state, layout=layout, rank=rank, on_cpu=False)) for rank in layout.ranks()}


def test_stages_have_their_layers_and_the_ends_what_is_before_and_behind() -> None:
    table, state = model(num_hidden_layers=3)
    first, last = held(table, state, STAGES).values()
    assert "model.embed_tokens.weight" in first and "model.embed_tokens.weight" not in last
    assert {"model.norm.weight", "lm_head.weight"} <= last.keys() and not {"model.norm.weight"} & first.keys()
    layers = [{n.split(".")[2] for n in names if ".layers." in n} for names in (first, last)]
    assert layers == [{"0"}, {"1", "2"}], "the last stages have one more"
    assert first.keys() | last.keys() == held(table, state, ONE_RANK)[EngineRank(0, 0)].keys()


def test_the_partition_that_was_said_goes_before_the_even_one() -> None:
    table, state = model(num_hidden_layers=3)
    first, _ = held(table, state, EngineLayout(pp_size=2, stage_layers=(2, 1))).values()
    assert {n.split(".")[2] for n in first if ".layers." in n} == {"0", "1"}
    with pytest.raises(ConfigError, match="do not add up to the 3 layers"):
        held(table, state, EngineLayout(pp_size=2, stage_layers=(1, 1)))
    with pytest.raises(ConfigError, match="fewer stages"):
        held(table, state, EngineLayout(pp_size=4))


def test_a_tied_head_is_the_embedding_again_on_the_last_stage() -> None:
    table, state = model(tie_word_embeddings=True)
    first, last = held(table, state, STAGES).values()
    assert torch.equal(last["lm_head.weight"], first["model.embed_tokens.weight"]) and "lm_head.weight" not in first
    assert "lm_head.weight" not in held(table, state, ONE_RANK)[EngineRank(0, 0)]


def test_some_families_have_a_head_on_every_stage() -> None:
    table, state = model(**MOE)
    assert all("lm_head.weight" in tensors for tensors in held(table, state, STAGES).values())


def test_experts_lie_next_to_each_other_in_their_group_and_are_split_within_it() -> None:
    table, state = model(**MOE)
    whole = held(table, state, ONE_RANK)[EngineRank(0, 0)]
    name = "model.layers.0.mlp.experts.w2_weight"
    experts = whole[name].view(4, 20, 32)
    for rank, tensors in held(table, state, EXPERTS).items():
        group, place = divmod(rank.tp_rank, 2)
        want = experts[2 * group : 2 * group + 2, :, 16 * place : 16 * place + 16]
        assert torch.equal(tensors[name].view(2, 20, 16), want)
        assert torch.equal(tensors["model.layers.0.mlp.gate.weight"], whole["model.layers.0.mlp.gate.weight"])


def test_dp_groups_hold_attention_and_embedding_as_an_engine_of_their_own_and_share_the_rest() -> None:
    table, state = model()
    whole = held(table, state, ONE_RANK)[EngineRank(0, 0)]
    shared = held(table, state, EngineLayout(tp_size=2))
    for rank, tensors in held(table, state, GROUPS).items():
        for name, tensor in tensors.items():
            alone = "self_attn" in name or "embed_tokens" in name
            assert torch.equal(tensor, whole[name] if alone else shared[rank][name]), name
    head = held(table, state, EngineLayout(tp_size=2, dp_size=2, dp_lm_head=True))
    assert all(torch.equal(tensors["lm_head.weight"], whole["lm_head.weight"]) for tensors in head.values())


def test_a_dense_mlp_may_be_whole_while_experts_and_shared_experts_are_not() -> None:
    experts = {"n_routed_experts": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "num_experts_per_tok": 1}
    table, state = model(model_type="glm4_moe", intermediate_size=64, first_k_dense_replace=1, **experts)
    layout = EngineLayout(tp_size=2, ep_size=2, whole_dense_mlp=True)
    tensors = held(table, state, layout)[EngineRank(0, 1)]
    assert tensors["model.layers.0.mlp.gate_up_proj.weight"].shape == (128, 20)
    assert tensors["model.layers.1.mlp.shared_experts.gate_up_proj.weight"].shape == (32, 20)
    assert tensors["model.layers.1.mlp.experts.w13_weight"].shape == (64, 20), "one of two experts, whole"


class CountingDigest:
    """Counts the bytes of all digests."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(self, parts: Any) -> str:
        hasher = self.begin()
        hasher.add(parts)
        return hasher.finish()

    def finish(self, hashers: Any) -> list[str]:
        return digest.finish(hashers)

    def begin(self) -> Any:
        hasher, add = digest.begin(), digest.begin().add

        def counted(parts: Any) -> None:
            self.num_bytes += sum(t.numel() * t.element_size() for t in parts)
            add(parts)

        add, hasher.add = hasher.add, counted  # type: ignore[method-assign]
        return hasher


def expected_of(table: FamilyTable, state: State, layouts: list[EngineLayout]) -> tuple[Any, int]:
    """What `ExpectedDigests` says, and how many bytes it took digests of."""
    counting = CountingDigest()
    expected = ExpectedDigests(table, layouts, counting)
    for name, tensor in state.items():
        expected.add(name, tensor)
    return expected.finish(), counting.num_bytes


def test_what_many_ranks_hold_alike_is_hashed_once() -> None:
    table, state = model(vocab_size=64, intermediate_size=64)  # nothing is padded
    once = sum(t.numel() * t.element_size() for t in state.values())
    assert expected_of(table, state, [ONE_RANK, ONE_RANK, STAGES])[1] == once
    replicated = sum(t.numel() * t.element_size() for n, t in state.items() if "norm" in n)
    assert expected_of(table, state, [EngineLayout(tp_size=2)] * 3)[1] == once, "shares, and norms once for both"
    digests, taken = expected_of(table, state, [ONE_RANK, EngineLayout(tp_size=2)])
    assert taken == 2 * once - replicated and digests[ONE_RANK].keys() == {EngineRank(0, 0)}


EVEN = {"moe_intermediate_size": 128, "intermediate_size": 128, "vocab_size": 256}
"""Every rank's share has more than padding."""


@pytest.mark.parametrize("layout", [STAGES, EXPERTS, EngineLayout(tp_size=2, pp_size=2, ep_size=2)])
def test_a_rank_hears_of_what_it_holds_and_of_nothing_else(layout: EngineLayout) -> None:
    table, state = model(**{**MOE, **EVEN})
    heard = hf_names_held(table, layout)
    assert set().union(*heard.values()) == set(state)
    for rank, names in heard.items():
        held = dict(engine_tensors(table, state, layout=layout, rank=rank, on_cpu=False))
        unheard = {name: torch.full_like(state[name], torch.nan) for name in state.keys() - names}
        blank = {**state, **unheard}
        again = dict(engine_tensors(table, blank, layout=layout, rank=rank, on_cpu=False))
        assert all(torch.equal(again[name], tensor) for name, tensor in held.items())
        for name in names:
            other = {**state, name: state[name] + 1.0}
            changed = dict(engine_tensors(table, other, layout=layout, rank=rank, on_cpu=False))
            assert any(not torch.equal(changed[key], held[key]) for key in held), name


def reports(table: FamilyTable, state: State, layout: EngineLayout) -> list[RankChecksums]:
    """As an engine on a CPU gives them."""
    said = EngineLayout(tp_size=layout.tp_size, pp_size=layout.pp_size, dp_size=layout.dp_size)
    return [
        RankChecksums(
            rank,
            said,
            {n: digest(t) for n, t in engine_tensors(table, state, layout=layout, rank=rank, on_cpu=True)},
        )
        for rank in layout.ranks()
    ]


LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}


@pytest.mark.parametrize("family", [{"model_type": "glm4_moe"}, {"model_type": "glm4_moe_lite", **LATENT}])
@pytest.mark.parametrize("layout", [ONE_RANK, STAGES, EXPERTS])
def test_an_engine_may_hold_these_routers_in_float32(family: dict[str, Any], layout: EngineLayout) -> None:
    """And no other values, and no other tensor."""
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 0}
    table, state = model(**experts, **family, num_key_value_heads=4)
    state = {n: t if table.entry_of_hf(n).row.wide else t.bfloat16() for n, t in state.items()}
    expected, _ = expected_of(table, state, [layout])
    narrow = reports(table, state, layout)

    def check(changes: dict[str, torch.Tensor]) -> None:
        changed = {name: digest(tensor) for name, tensor in changes.items()}
        ranks = [
            RankChecksums(r.rank, r.layout, {n: changed.get(n, value) for n, value in r.checksums.items()})
            for r in narrow
        ]
        require_equal(table, expected, {"u": (layout, ranks)}, version=1, transport="t")

    check({})
    names = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)]
    check({name: state[name].float() for name in names})
    other = state[names[1]].float()
    other[0, 0] *= 1 + 2**-20
    with pytest.raises(WeightSyncError, match=f"differing: {names[1]}"):
        check({names[0]: state[names[0]].float(), names[1]: other})
    norm = "model.layers.0.input_layernorm.weight"
    with pytest.raises(WeightSyncError, match=f"differing: {norm}"):
        check({norm: state[norm].float()})


@pytest.mark.parametrize("layout", [STAGES, EXPERTS, GROUPS, EngineLayout(tp_size=2, pp_size=2, ep_size=2)])
def test_every_rank_is_compared_and_named(layout: EngineLayout) -> None:
    table, state = model(**MOE)
    expected, _ = expected_of(table, state, [layout])
    good = reports(table, state, layout)

    def check(ranks: list[RankChecksums], told: EngineLayout = layout) -> None:
        require_equal(table, {**expected, told: expected[layout]}, {"u": (told, ranks)}, version=1, transport="t")

    check([*good, *good])  # every DP group reports all ranks
    name = next(reversed(good[-1].checksums))
    bad = RankChecksums(good[-1].rank, good[-1].layout, {**good[-1].checksums, name: "0"})
    with pytest.raises(WeightSyncError, match=f"rank {good[-1].rank}: differing: {name}"):
        check([*good[:-1], bad])
    with pytest.raises(WeightSyncError, match="differing"):
        check([*good, bad])  # one of two reports of a rank
    with pytest.raises(WeightSyncError, match="reported ranks"):
        check(good[:-1])
    with pytest.raises(WeightSyncError, match="but was started with"):
        check(good, EngineLayout(tp_size=layout.tp_size, pp_size=layout.pp_size + 1))


@pytest.mark.parametrize(
    ("changes", "layout", "words"),
    [
        ({}, STAGES, None),
        ({}, GROUPS, None),
        ({}, EngineLayout(tp_size=2, ep_size=2), "0 experts"),
        (MOE, EXPERTS, None),
        ({**MOE, "num_experts": 3}, EXPERTS, "3 experts"),
        ({"model_type": "llama"}, GROUPS, "DP attention"),
        ({"model_type": "llama", "tie_word_embeddings": True}, STAGES, "tied output layer"),
        ({}, EngineLayout(tp_size=2, whole_dense_mlp=True), "moe_dense_tp_size"),
        ({"model_type": "qwen3_next"}, STAGES, "pipeline stages"),
        ({"model_type": "mimo"}, STAGES, "pipeline stages"),
        ({"model_type": "minimax_m2", "num_local_experts": 4}, EXPERTS, None),
        ({"model_type": "minimax_m2"}, EngineLayout(tp_size=2, dp_size=2, dp_lm_head=True), "enable_dp_lm_head"),
        ({"model_type": "gpt_oss", "num_local_experts": 4}, STAGES, None),
        ({"model_type": "gpt_oss", "num_local_experts": 4}, EngineLayout(tp_size=2), "one GPU per pipeline stage"),
    ],
)
def test_what_sglang_does_not_do_with_a_family_is_refused(
    changes: dict[str, Any], layout: EngineLayout, words: str | None
) -> None:
    problem = layout_problem({**CONFIG, **changes}, layout)
    assert problem is None if words is None else words in str(problem)
