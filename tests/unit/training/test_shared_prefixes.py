"""Sharing prefixes changes nothing: loss and gradient of a decoder in float64, through the trainer's own rows.

The decoder is small and plain (embedding, rotary attention with grouped heads, a gated MLP, the output layer); it
attends through the trainer's `PackedAttention` and is scored by its `score_tokens`. The reference computes each sample
by itself, from its tokens alone, with an explicit softmax over an explicit mask.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.algorithms import Algorithm
from slime.core.batch import TrainBatch
from slime.data.context_split import split_context
from slime.data.packing import pack
from slime.models.common.packed_attention import PackedAttention, PackedSequences
from slime.models.common.rotary import cos_sin
from slime.ops.qk_rotary import rotate
from slime.training.model.log_probs import TokenScores, VocabShard, score_tokens
from slime.training.step.loss import objective_of
from slime.training.step.micro_batch import MicroBatch, PreparedBatch, prepare, to_device, with_advantages
from tests.support.formulas import make_log_probs
from tests.support.training import agent_batch, forked_batch, training_args, with_samples

VOCAB, LAYERS, HEADS, GROUPS, DIM = 31, 2, 4, 2, 8
HIDDEN = HEADS * DIM
TOLERANCE = 1e-9
"""Relative to the largest entry of each gradient; float64."""
SETTINGS: dict[str, Any] = {
    "use_dynamic_global_batch_size": True,
    "use_kl_loss": True,
    "kl_loss_coef": 0.3,
    "entropy_coef": 0.05,
    "log_probs_chunk_size": 7,
}
CPU = torch.device("cpu")


class Decoder:
    """A decoder in float64; `attend(q, k, v)` is how tokens see each other."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        shapes = {"embedding": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
        for i in range(LAYERS):
            shapes |= {f"qkv{i}": (HIDDEN, (HEADS + 2 * GROUPS) * DIM), f"out{i}": (HIDDEN, HIDDEN)}
            shapes |= {
                f"gate{i}": (HIDDEN, 3 * HIDDEN),
                f"up{i}": (HIDDEN, 3 * HIDDEN),
                f"down{i}": (3 * HIDDEN, HIDDEN),
            }
        self.weights = {
            name: (torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(HIDDEN)).requires_grad_()
            for name, shape in shapes.items()
        }

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """tokens, positions [T] -> [T, H]."""
        w = self.weights
        cos, sin = (x.squeeze(1) for x in cos_sin(positions, 100.0 ** -(torch.arange(DIM // 2) / (DIM // 2)), 1.0))
        x = w["embedding"][tokens]
        for i in range(LAYERS):
            mixed = (x / x.pow(2).mean(-1, keepdim=True).sqrt()) @ w[f"qkv{i}"]
            q, k, v = mixed.unflatten(-1, (-1, DIM)).split([HEADS, GROUPS, GROUPS], dim=1)
            q, k = (rotate(y, cos, sin, interleaved=False) for y in (q, k))
            x = x + attend(q, k, v) @ w[f"out{i}"]
            x = x + (torch.nn.functional.silu(x @ w[f"gate{i}"]) * (x @ w[f"up{i}"])) @ w[f"down{i}"]
        return x


def by_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence, written out."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
    behind = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(behind, -math.inf).softmax(-1), v).flatten(1)


def packed_attention(packed: PackedSequences) -> Any:
    attention = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale = None
    return lambda q, k, v: attention(q, k, v, packed_seq_params=packed)


def in_chunks(prepared: PreparedBatch, positions: tuple[int, ...], cp_size: int) -> Any:
    """Attention of a row that `cp_size` ranks divide: each has the queries of its chunks and gathers the keys."""
    assert prepared.shared is not None
    samples = [prepared.batch.samples[p] for p in positions]
    row = pack(samples, pad_each_to=2 * cp_size, shared=prepared.shared[positions])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros(len(q), HIDDEN, dtype=q.dtype)
        for rank in range(cp_size):
            cut = split_context(row.cu_seqlens, cp_rank=rank, cp_size=cp_size, prefixes=row.prefixes)
            lengths = {"query_lengths": cut.query_lengths, "key_lengths": cut.key_lengths}
            own, keys = (torch.from_numpy(x) for x in (cut.positions, cut.order[cut.key_rows]))
            chunks = packed_attention(PackedSequences(qkv_format="thd", **lengths))(q[own], k[keys], v[keys])
            out = out.index_copy(0, own, chunks)
        return out

    return attend


def in_the_row(decoder: Decoder, batch: MicroBatch, attend: Any = None) -> TokenScores:
    assert batch.packed.positions is not None
    hidden = decoder.hidden(batch.tokens, batch.packed.positions, attend or packed_attention(batch.packed))
    shard = VocabShard(0, VOCAB, None)
    return score_tokens(
        hidden[batch.asked_positions],
        decoder.weights["output"],
        batch.asked_tokens,
        shard,
        with_entropy=True,
        entropy_grad=True,
        chunk_tokens=7,
    ).at(batch.answers)


def one_by_one(decoder: Decoder, prepared: PreparedBatch, positions: tuple[int, ...]) -> TokenScores:
    log_probs, entropies = [], []
    for s in (prepared.batch.samples[p] for p in positions):
        tokens = torch.from_numpy(s.tokens).long()
        hidden = decoder.hidden(tokens, torch.arange(len(tokens)), by_itself)
        log_p = (hidden @ decoder.weights["output"].T).log_softmax(-1)[-s.response_length - 1 : -1]
        log_probs.append(log_p.gather(1, tokens[-s.response_length :, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    whole = torch.cat(log_probs)
    return TokenScores(whole, torch.cat(entropies), whole.detach(), torch.zeros(len(whole), dtype=torch.bool))


def step(
    batch: TrainBatch, *, dp_size: int = 1, cp_size: int = 1, plain: bool = False, **changes: Any
) -> tuple[float, dict[str, Tensor], int]:
    """Loss, gradients and computed tokens of a step, over all ranks and micro-batches. `plain`: by the reference."""
    args = training_args(Path("unused"), **{**SETTINGS, **changes})
    algorithm, decoder = Algorithm.of(args), Decoder()
    before = make_log_probs(batch)
    prepared = prepare(batch, args, algorithm, dp_size=dp_size, cp_size=cp_size)
    prepared = with_advantages(prepared, args, algorithm, before)
    objective, total, num_tokens = objective_of(args, algorithm), 0.0, 0
    for positions in (row for rank in prepared.schedule.steps[0].micro_batches for row in rank):
        pad = {"pad_to_multiple": 4} if cp_size == 1 else {"pad_each_to": 2 * cp_size}
        mb = to_device(prepared, positions, CPU, **pad)
        attend = None if cp_size == 1 or not positions else in_chunks(prepared, positions, cp_size)
        scores = one_by_one(decoder, prepared, positions) if plain and positions else in_the_row(decoder, mb, attend)
        loss = objective.loss(mb, scores).loss
        loss.backward()
        total, num_tokens = total + loss.item(), num_tokens + len(mb.tokens)
    gradients = {name: w.grad for name, w in decoder.weights.items() if w.grad is not None}
    assert len(gradients) == len(decoder.weights)
    return total, gradients, num_tokens


def check(got: tuple[float, dict[str, Tensor], int], want: tuple[float, dict[str, Tensor], int]) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    for name, gradient in want[1].items():
        size = float(gradient.abs().max())
        assert size > 1e-6, f"{name}: a gradient of zero proves nothing"
        assert float((got[1][name] - gradient).abs().max()) <= TOLERANCE * size, name


SPLITS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"micro_batch_size": 100}),
    (1, {"micro_batch_size": 3}),
    (3, {"micro_batch_size": 2}),
    (2, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 90, "balance_data": True}),
    (1, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096}),
)


def test_loss_and_gradient_are_those_of_samples_by_themselves() -> None:
    batch = forked_batch(vocab_size=VOCAB)
    want = step(batch, plain=True, micro_batch_size=1)
    check(step(batch, micro_batch_size=1), want)
    for dp_size, split in SPLITS:
        shared = step(batch, dp_size=dp_size, use_prefix_sharing=True, **split)
        check(shared, want)
        assert shared[2] < step(batch, dp_size=dp_size, **split)[2], "fewer tokens are computed"


@pytest.mark.parametrize("estimator", ["grpo_turn", "reinforce_plus_plus"])
def test_an_agents_branches_have_the_loss_and_gradient_of_branches_by_themselves(estimator: str) -> None:
    """Law: forks at several depths change nothing, on one rank or on several that divide each row, although a shared
    token has another advantage in each branch and is trained in some and context in others."""
    batch, how = agent_batch(1, vocab_size=VOCAB), {"advantage_estimator": estimator, "use_kl_loss": False}
    want = step(batch, plain=True, micro_batch_size=1, **how)
    whole = sum(s.num_tokens for s in batch.samples)
    for cp_size, split in (
        (1, {"micro_batch_size": 100}),
        (2, {"micro_batch_size": 100}),
        (2, {"micro_batch_size": 4}),
    ):
        shared = step(batch, cp_size=cp_size, use_prefix_sharing=True, **split, **how)
        check(shared, want)
        assert shared[2] < (0.5 if split["micro_batch_size"] == 100 else 0.8) * whole, "shared tokens are computed once"


def token_loss(
    args: Any, data: dict[str, Any], log_probs: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """A user's loss that weights each token by its id and by what stands where it is predicted."""
    behind = data["tokens"][data["predicting"]]
    return -sum_of_sample_mean(log_probs * (1.0 + data["target_tokens"] + 0.1 * behind) / VOCAB), {}


def test_a_loss_of_the_user_sees_the_tokens_of_each_sample() -> None:
    """Law: what a custom loss reads of a response token is that token's, whatever is shared."""
    batch = forked_batch(vocab_size=VOCAB)
    prompts_only = with_samples(batch, [s for s in batch.samples if s.index % 4 in (1, 2)])
    own = {"loss_type": "custom_loss", "custom_loss_function_path": f"{__file__}:token_loss"}
    for given_batch in (batch, prompts_only):
        want = step(given_batch, plain=True, micro_batch_size=1, **own)
        for dp_size, split in SPLITS:
            check(step(given_batch, dp_size=dp_size, use_prefix_sharing=True, **split, **own), want)


@settings(max_examples=10)
@given(st.integers(0, 1000), st.integers(1, 3), st.integers(1, 12), st.booleans())
def test_the_partition_is_not_felt(seed: int, dp_size: int, size: int, by_tokens: bool) -> None:
    """Law 3 with sharing: any samples in any micro-batches."""
    batch = forked_batch(2, seed=seed, vocab_size=VOCAB)
    how = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 20 * size} if by_tokens else {"micro_batch_size": size}
    check(step(batch, dp_size=dp_size, use_prefix_sharing=True, **how), step(batch, micro_batch_size=1))
