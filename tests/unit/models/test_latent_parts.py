"""Parts of latent attention against transformers: yarn and its magnitudes, both rotations, the indexer's choice."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from slime.models.common.rotary import attention_factor, cos_sin, inverse_frequencies, rotate, softmax_scale
from slime.models.deepseek import layers
from slime.models.deepseek.config import indexer_kinds
from slime.models.deepseek.layers import SparseIndexer
from tests.support.sparse_attention import mask_of

DEEPSEEK_V3 = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "as published": DEEPSEEK_V3,
    "two magnitudes": {**DEEPSEEK_V3, "mscale": 1.3, "mscale_all_dim": 0.7},
    "one magnitude": {k: v for k, v in DEEPSEEK_V3.items() if not k.startswith("mscale")},
    "given factor": {**DEEPSEEK_V3, "attention_factor": 1.7, "truncate": False, "beta_fast": 20},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_yarn_is_that_of_transformers(name: str) -> None:
    hf: dict[str, Any] = {"rope_theta": 10000.0, "max_position_embeddings": 163840, "rope_scaling": SCALINGS[name]}
    config = transformers.DeepseekV3Config(**{**hf, "rope_scaling": SCALINGS[name] and dict(SCALINGS[name] or {})})
    config._attn_implementation = "eager"
    theirs = deepseek.DeepseekV3RotaryEmbedding(config)
    torch.testing.assert_close(inverse_frequencies(hf, 64), theirs.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor(hf) == pytest.approx(theirs.attention_scaling, rel=1e-9)
    with torch.device("meta"):
        assert softmax_scale(hf, 192) == pytest.approx(deepseek.DeepseekV3Attention(config, 0).scaling, rel=1e-9)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_is_that_of_transformers(interleaved: bool) -> None:
    positions, frequencies = torch.tensor([0, 1, 2, 0, 1, 900]), torch.rand(4)
    q, k = torch.randn(2, 6, 3, 8)
    cos, sin = cos_sin(positions, frequencies, 1.2)
    apply = deepseek.apply_rotary_pos_emb_interleave if interleaved else deepseek.apply_rotary_pos_emb
    want = apply(q, k, *(torch.cat([x, x], -1).squeeze(1) for x in (cos, sin)))
    for got, wanted in zip((rotate(x, cos, sin, interleaved=interleaved) for x in (q, k)), want, strict=True):
        torch.testing.assert_close(got, wanted)


def _indexers() -> tuple[SparseIndexer, Any, dict[str, Any]]:
    hf = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 5, "qk_rope_head_dim": 8, "q_lora_rank": 24}
    config = SimpleNamespace(hidden_size=32, params_dtype=torch.float32, sequence_parallel=False)
    # transformers 5.12 never rotates interleaved pairs in the indexer of GLM, 5.19 always does
    interleaved = "apply_rotary_pos_emb_interleave(" in inspect.getsource(glm.GlmMoeDsaIndexer.forward)
    own = SparseIndexer(config, {**hf, "indexer_rope_interleave": interleaved})  # type: ignore[arg-type]
    theirs = glm.GlmMoeDsaIndexer(transformers.GlmMoeDsaConfig(**hf, hidden_size=32), 0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    names = {"wq_b": "linear_wq_b", "wk": "linear_wk", "weights_proj": "linear_weights_proj", "k_norm": "k_norm"}
    own.load_state_dict({names[n.split(".")[0]] + "." + n.split(".")[1]: p for n, p in theirs.named_parameters()})
    return own, theirs, hf


@pytest.mark.parametrize("at_once", [1, 8 * 11 * 4, 1 << 27])
def test_the_indexer_chooses_what_transformers_chooses(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "SCORES_AT_ONCE", at_once)
    own, theirs, _ = _indexers()
    assert not any(p.requires_grad for p in own.parameters())
    lengths = (11, 3, 5, 9)
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden, latent = torch.randn(28, 1, 32), torch.randn(28, 1, 24)
    frequencies = torch.tensor([1.0, 0.3, 0.1, 0.03])
    cos, sin = cos_sin(positions, frequencies, 1.0)
    starts = torch.tensor([0, 11, 14, 19, 28])
    packed = SimpleNamespace(query_lengths=lengths, key_lengths=lengths, cu_seqlens_q=starts, shard=None)
    assert own.needed(packed)  # type: ignore[arg-type]
    assert not own.needed(SimpleNamespace(cu_seqlens_q=torch.tensor([0, 5, 9])))  # type: ignore[arg-type]
    selected = own(hidden, latent, cos, sin, packed)
    masks = [None if keys is None else mask_of(keys, keys.size(0)) for keys in selected]
    assert [m is None for m in masks] == [False, True, True, False]  # what is no longer than 5 sees everything
    for start, n, mask in zip((0, 19), (11, 9), (masks[0], masks[3]), strict=True):
        rows = slice(start, start + n)
        angles = tuple(torch.cat([x, x], -1).squeeze(1)[None, rows] for x in (cos, sin))
        length = rows.stop - rows.start
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None]  # transformers 5.19 needs it
        causal = torch.where(causal, 0.0, float("-inf"))
        inputs = hidden[rows].transpose(0, 1), latent[rows].transpose(0, 1), angles, causal, positions[None, rows]
        chosen = theirs(*inputs)
        want = torch.zeros(n, n, dtype=torch.bool).scatter(1, chosen[0].long(), True).tril()
        assert mask is not None and torch.equal(mask, want)
        assert mask.sum(1).tolist() == [min(i + 1, 5) for i in range(n)]


def test_the_choice_does_not_depend_on_what_comes_later_or_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 3, also where no head has a positive product: most keys of these queries score zero."""
    own, _, _ = _indexers()
    q, k = torch.randn(40, 8, 16).abs(), -torch.randn(40, 16).abs()
    k[::5] *= -1
    weights = torch.rand(40, 8)
    whole = mask_of(own._choose(q, k, weights), 40)
    scores = (q.flatten(0, 1) @ k.T).relu().view(40, 8, 40)
    first = torch.einsum("nh,nhm->nm", weights, scores) - torch.arange(40) * 1e-6
    first = first.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -float("inf"))
    assert torch.equal(whole, mask_of(first.argsort(descending=True)[:, :5], 40))
    monkeypatch.setattr(layers, "SCORES_AT_ONCE", 500)
    for a, b in ((0, 40), (0, 10), (20, 30), (30, 37)):
        assert torch.equal(mask_of(own._choose(q[a:b], k[:b], weights[a:b]), b), whole[a:b, :b])


@pytest.mark.parametrize(
    "keys",
    [{}, {"index_topk_freq": 3}, {"index_topk_freq": 2, "index_skip_topk_offset": 3}, {"index_topk_pattern": "FSSFSF"}],
)
def test_which_layers_choose(keys: dict[str, Any]) -> None:
    config = transformers.GlmMoeDsaConfig(num_hidden_layers=6, **keys)
    assert indexer_kinds({"index_topk": 4, "num_hidden_layers": 6, **keys}) == config.indexer_types
    assert indexer_kinds({"num_hidden_layers": 6, **keys}) == []
