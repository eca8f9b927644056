"""Laws of the tensors that an engine must hold: its layout, buckets, digests and their comparison."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.core.errors import ConfigError, WeightSyncError
from slime.core.topology import ONE_RANK, EngineLayout
from slime.models.common.table import Unit
from slime.serving.payloads import digest
from slime.weights.engine_layout import ExpectedDigests, engine_shards, padded_vocab_size
from slime.weights.holding import Share
from slime.weights.send_plan import Bucket
from slime.weights.sync import compare
from tests.support.weights import engine_tensors, model, tampered


def engine_shard(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.cat(engine_shards(*args, **kwargs))


def share(part: int, parts: int) -> Share:
    """Of an engine whose ranks share everything."""
    return Share(part, parts, parts)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_engine_shards_hold_every_value_once_and_zeros_beside(on_cpu: bool) -> None:
    table, state = model()
    for tp_size in (1, 2):
        for entry in table.entries:
            parts = [state[n] for n in entry.hf]
            shards = [engine_shard(table, entry, parts, share(r, tp_size), on_cpu=on_cpu) for r in range(tp_size)]
            assert all(s.shape == shards[0].shape for s in shards)
            got = torch.cat([s.flatten() for s in shards])
            want = torch.cat([p.flatten() for p in parts] * (tp_size if entry.row.dim is None else 1))
            assert torch.equal(got[got != 0].sort().values, want.sort().values), entry
            if not on_cpu and entry.row.units != (Unit.VOCAB,):
                assert got.numel() == want.numel()


def test_a_gpu_replicates_kv_heads_when_there_are_fewer_than_ranks() -> None:
    table, state = model()
    entry = table.entry("decoder.layers.0.self_attention.linear_qkv.weight")
    parts = [state[n] for n in entry.hf]
    for rank in range(4):
        shard = engine_shard(table, entry, parts, share(rank, 4), on_cpu=False)
        head = rank // 2
        want = [parts[0][6 * rank : 6 * rank + 6], *(p[6 * head : 6 * head + 6] for p in parts[1:])]
        assert torch.equal(shard, torch.cat(want))
    with pytest.raises(ConfigError, match="3 ranks"):
        engine_shard(table, entry, parts, share(0, 3), on_cpu=False)


def test_a_cpu_pads_heads_and_mlp_with_zeros() -> None:
    table, state = model()

    def shard(name: str, rank: int) -> torch.Tensor:
        entry = table.entry(f"decoder.layers.0.{name}.weight")
        return engine_shard(table, entry, [state[n] for n in entry.hf], share(rank, 4), on_cpu=True)

    prefix = "model.layers.0."
    q, k = state[f"{prefix}self_attn.q_proj.weight"], state[f"{prefix}self_attn.k_proj.weight"]
    qkv = shard("self_attention.linear_qkv", 1)  # 2 KV heads become 4, so each rank has one and two query heads
    assert qkv.shape[0] == 4 * 6 and torch.equal(qkv[:12], q[12:24]) and torch.equal(qkv[12:18], k[6:12])
    assert not shard("self_attention.linear_qkv", 3).any()
    assert shard("self_attention.linear_proj", 1).shape == (20, 12)
    fc1 = shard("mlp.linear_fc1", 1)  # 36 features become 128, so rank 1 has the last 4
    up = state[f"{prefix}mlp.up_proj.weight"]
    assert fc1.shape[0] == 64 and torch.equal(fc1[32:36], up[32:]) and not fc1[36:].any()


def test_vocabulary_is_padded_to_64_and_more_only_where_ranks_need_it() -> None:
    assert [padded_vocab_size(v, 1) for v in (64, 65, 128)] == [64, 128, 128]
    assert padded_vocab_size(64, 2) == 64 and padded_vocab_size(64, 3) == 192


def test_the_hook_for_faults_never_sees_the_trainers_own_tensor() -> None:
    own = torch.ones(3)
    sent = tampered(Bucket((("a", own),)), lambda _, t: t.mul_(2))
    assert own.tolist() == [1, 1, 1] and sent.tensors[0][1].tolist() == [2, 2, 2]


def test_comparison_names_missing_extra_and_differing() -> None:
    difference = compare({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "0", "d": "4"})
    assert (difference.missing, difference.extra, difference.differing) == (("c",), ("d",), ("b",))
    assert difference and difference.num_equal == 1 and not compare({"a": "1"}, {"a": "1"})


def test_doubled_missing_and_misshapen_tensors_are_refused() -> None:
    table, state = model()
    expected = ExpectedDigests(table, [ONE_RANK], digest)
    expected.add("model.norm.weight", state["model.norm.weight"])
    with pytest.raises(WeightSyncError, match="twice"):
        expected.add("model.norm.weight", state["model.norm.weight"])
    with pytest.raises(WeightSyncError, match="shape"):
        expected.add("lm_head.weight", state["lm_head.weight"][1:])
    with pytest.raises(WeightSyncError, match="did not send"):
        expected.finish()


def test_the_experts_of_a_layer_are_one_resident_tensor() -> None:
    table, state = model(model_type="qwen3_moe", num_experts=3, moe_intermediate_size=36)
    layout = EngineLayout(tp_size=2)
    first, second = (dict(engine_tensors(table, state, layout=layout, rank=r, on_cpu=True)) for r in layout.ranks())
    prefix = "model.layers.1.mlp.experts."
    gate, up, down = (state[f"{prefix}2.{p}_proj.weight"] for p in ("gate", "up", "down"))
    w13, w2 = first[f"{prefix}w13_weight"].view(3, -1, 20), first[f"{prefix}w2_weight"].view(3, 20, -1)
    assert torch.equal(w13[2], torch.cat([gate[:32], up[:32]])) and torch.equal(w2[2], down[:, :32])
    rest = second[f"{prefix}w13_weight"].view(3, 64, 20)[2]  # 36 features become 64; the second rank has the last 4
    assert torch.equal(rest[:4], gate[32:]) and torch.equal(rest[32:36], up[32:]) and not rest[4:32].any()

    expected = ExpectedDigests(table, [layout], digest)
    for name in reversed(table.hf_names):
        expected.add(name, state[name])
    assert expected.finish()[layout][layout.ranks()[0]] == {name: digest(tensor) for name, tensor in first.items()}
