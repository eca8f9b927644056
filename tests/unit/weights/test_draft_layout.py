"""What a draft holds: with one, an engine reports the rows of multi-token prediction, and embedding and output layer
once more; without, it takes no notice of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.core.engine_interface import RankChecksums
from slime.core.errors import WeightSyncError
from slime.core.topology import EngineLayout, EngineRank
from slime.models import table_for
from slime.models.common.mtp import with_mtp
from slime.models.common.table import DRAFT, FamilyTable
from slime.serving.payloads import digest
from slime.weights.engine_layout import ExpectedDigests
from slime.weights.expert_runs import places_of
from slime.weights.sync import require_equal
from tests.unit.settings.test_speculation import CONFIG
from tests.unit.weights.test_qwen_next_layout import NEXT

RANK = EngineRank(0, 0)
MIMO = {
    "model_type": "mimo",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 1,
}
DRAFTS = {"deepseek_v3": CONFIG, "qwen3_next": NEXT, "mimo": MIMO}


def tensors_of(table: FamilyTable, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(table.shape_of(n), generator=generator) for n in table.hf_names}


def expected(table: FamilyTable, tensors: dict[str, torch.Tensor], layout: EngineLayout) -> dict[str, str]:
    digests = ExpectedDigests(table, [layout], digest)
    for name in table.hf_names:
        digests.add(name, tensors[name])
    return dict(digests.finish()[layout][RANK])


@pytest.mark.parametrize("config", DRAFTS.values(), ids=DRAFTS)
def test_a_draft_holds_the_layer_and_what_it_has_from_the_model(config: dict[str, Any]) -> None:
    table = table_for(with_mtp(config))
    tensors = tensors_of(table)
    alone, both = (expected(table, tensors, EngineLayout(draft=draft)) for draft in (False, True))
    assert not any(name.startswith(DRAFT) for name in alone)
    more = both.keys() - alone.keys()
    assert more and all(name.startswith(DRAFT) for name in more)
    assert all(both[name] == alone[name] for name in alone)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert both[DRAFT + name] == both[name]
    assert {e.engine for e in table.entries if e.row in table.mtp} <= more


@pytest.mark.parametrize("config", DRAFTS.values(), ids=DRAFTS)
def test_a_draft_with_an_old_tensor_is_found(config: dict[str, Any]) -> None:
    table, layout = table_for(with_mtp(config)), EngineLayout(draft=True)
    wanted = expected(table, tensors_of(table), layout)
    stale = expected(table, tensors_of(table, seed=1), layout)
    for name in (n for n in wanted if n.startswith(DRAFT)):
        held = RankChecksums(RANK, layout, {**wanted, name: stale[name]})
        with pytest.raises(WeightSyncError, match=r"differing: draft\."):
            require_equal(table, {layout: {RANK: wanted}}, {"e": (layout, [held])}, version=1, transport="t")


@pytest.mark.parametrize("config", DRAFTS.values(), ids=DRAFTS)
def test_a_draft_that_is_not_trained_is_carried_but_for_what_it_has_from_the_model(config: dict[str, Any]) -> None:
    trained, table, layout = table_for(with_mtp(config)), table_for(config), EngineLayout(draft=True)
    held = expected(trained, tensors_of(trained), layout)
    wanted = {name: value for name, value in held.items() if not table.carries(name)}
    assert {n for n in wanted if n.startswith(DRAFT)} == {f"{DRAFT}model.embed_tokens.weight", f"{DRAFT}lm_head.weight"}
    own = expected(table, {n: t for n, t in tensors_of(trained).items() if n in table.hf_names}, layout)
    assert own == wanted
    require_equal(
        table, {layout: {RANK: own}}, {"e": (layout, [RankChecksums(RANK, layout, held)])}, version=1, transport="t"
    )


def test_experts_of_a_draft_travel_one_by_one() -> None:
    places = places_of(table_for(with_mtp(CONFIG)), on_cpu=False)
    assert places and not any(resident.startswith(DRAFT) for resident, _ in places.values())
