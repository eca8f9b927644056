"""Predicts the peak memory of the largest micro-batch before the run, by measuring two smaller ones.

Once a chunk of log-probs is full, the memory of a pass grows linearly with the number of tokens. Two measurements are
therefore enough to extrapolate for a given model and its settings (layout, recompute, kernels). With sparse attention,
both have more than `index_topk` tokens if the largest micro-batch does, because only then does a pass keep the selected
keys. If the largest micro-batch will not fit, the run fails before it samples anything, and the error says how many
tokens fit. The measured passes also compile the kernels.

Not predicted: attention without a fused kernel, whose masks grow quadratically with the sequence length (gpt-oss, or
context parallelism with `--kernels reference`); load imbalance under expert parallelism; a critic's passes; samples
longer than the settings allow; copies of keys for shared prefixes; micro-batches whose short samples select no keys.

Invariants
1. Weights, optimizer, buffers and RNG state do not change. Gradients are zero afterwards.
2. All ranks measure the same sizes, and each predicts its own peak. If the peak does not fit on one rank, all ranks
   raise an error. Collective.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.whole_batch import TokenWeights
from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import ConfigError
from slime.core.hf_config import read_hf_config
from slime.data.micro_batch_schedule import Schedule, StepSchedule
from slime.models import family_of
from slime.settings import Args
from slime.settings.groups.training import longest_sample
from slime.training.parallel import ParallelInfo
from slime.training.state.rank_state import generator_state, set_generator_state
from slime.training.step.loss import Objective
from slime.training.step.micro_batch import PreparedBatch
from slime.training.step.non_finite import KEPT_BYTES_PER_TOKEN
from slime.training.step.optimizer import Trainable
from slime.training.step.train_step import StepContext, micro_batch_multiple, rehearse_step

logger = logging.getLogger(__name__)

SMALL_PARTS = (8, 4)
"""The measured sizes are 1/8 and 1/4 of the largest micro-batch, but at least one and two chunks of log-probs, and at
least the number of tokens from which memory grows linearly."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Peak GPU memory of forward and backward passes, excluding weights, gradients and optimizer states."""

    at: tuple[int, int]
    """Tokens per rank in the two measured micro-batches, in ascending order."""
    num_bytes: tuple[int, int]
    """Peak memory of each measured micro-batch."""

    @property
    def bytes_per_token(self) -> float:
        """Slope of the line through both measurements, or through the origin if both sizes are equal."""
        (small, large), (low, high) = self.at, self.num_bytes
        return max(0.0, (high - low) / (large - small)) if large > small else high / large

    def peak(self, tokens: int) -> int:
        return int(self.num_bytes[1] + self.bytes_per_token * (tokens - self.at[1]))

    def fitting(self, num_bytes: int) -> int:
        """Returns the largest number of tokens that fits in `num_bytes`, or 0."""
        if self.bytes_per_token == 0.0:
            return self.at[1] if num_bytes >= self.num_bytes[1] else 0
        return max(0, self.at[1] + math.floor((num_bytes - self.num_bytes[1]) / self.bytes_per_token))


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest micro-batch that the settings allow."""

    tokens: int
    """Tokens per rank."""
    samples: int | None
    """`--micro-batch-size`, or None if micro-batches are filled by token count."""

    @classmethod
    def of(cls, args: Args, cp_size: int) -> Largest:
        """Computes the size from the settings. If prompts have no length limit, they count as 0 tokens.

        Samples are never split, so a sample longer than `--max-tokens-per-gpu` counts in full.
        """
        if args.use_dynamic_batch_size:
            assert args.max_tokens_per_gpu is not None, "the settings derive max_tokens_per_gpu"
            return cls(max(args.max_tokens_per_gpu, -(-longest_sample(args) // cp_size)), None)
        return cls(-(-args.micro_batch_size * longest_sample(args) // cp_size), args.micro_batch_size)

    def sizes(self, chunk_tokens: int, linear_from: int = 0) -> tuple[int, int]:
        """Returns the numbers of tokens per rank to measure. With at least `linear_from`, memory grows linearly."""
        chunk = max(chunk_tokens, 1, linear_from if linear_from <= self.tokens else 0)
        small, large = (max(self.tokens // part, chunk * (i + 1)) for i, part in enumerate(SMALL_PARTS))
        return min(small, self.tokens), min(large, self.tokens)

    def remedy(self, fitting: int) -> str:
        """Returns advice for the error message if only `fitting` tokens fit on a rank."""
        less = "recompute activations (--recompute-granularity full), or split the model over more GPUs"
        if self.samples is None:
            limits = f"set --max-tokens-per-gpu to {fitting} or less, and --rollout-max-context-len to the same number"
            return f"{limits}, or {less}" if fitting else less
        samples = fitting * self.samples // self.tokens
        return f"set --micro-batch-size to {samples} or less, or {less}" if samples else less


def training_peak(
    context: StepContext, objective: Objective, trainable: Trainable, info: ParallelInfo, later_bytes: int
) -> int:
    """Predicts this rank's peak memory when the policy trains on the largest micro-batch. Collective.

    `later_bytes` is the memory that the first optimizer step allocates. If the peak exceeds the memory of any GPU,
    raises `ConfigError` with the number of tokens that fit, on every rank.
    """
    passes, largest = rehearse(context, objective, trainable, info), Largest.of(context.args, info.sizes.cp)
    free_bytes, _ = torch.cuda.mem_get_info(context.device)
    gpu_bytes = free_bytes + torch.cuda.memory_reserved(context.device)  # excludes CUDA contexts
    kept_bytes = torch.cuda.memory_allocated(context.device) + later_bytes + kept_for_a_step(context.args, info.dp_size)
    peak = kept_bytes + passes.peak(largest.tokens)
    verdict = torch.tensor(
        [peak - gpu_bytes, -passes.fitting(gpu_bytes - kept_bytes)], dtype=torch.float64, device=context.device
    )
    dist.all_reduce(verdict, dist.ReduceOp.MAX)
    if verdict[0] > 0:
        raise ConfigError(refusal(largest, passes, -int(verdict[1]), kept_bytes=kept_bytes, gpu_bytes=gpu_bytes))
    if info.rank == 0:
        logger.info(
            "predicted peak memory: %.1f GB for micro-batches of %s tokens (%.2f MB per token), %.1f GB available",
            *(peak / 1e9, f"{largest.tokens:,}", passes.bytes_per_token / 1e6, gpu_bytes / 1e9),
        )
    return peak


def kept_for_a_step(args: Args, dp_size: int) -> int:
    """Returns the bytes that a rank keeps until the end of a step so that errors can name the tokens."""
    return -(-args.global_batch_size // dp_size) * longest_sample(args) * KEPT_BYTES_PER_TOKEN


def rehearse(context: StepContext, objective: Objective, trainable: Trainable, info: ParallelInfo) -> Passes:
    """Measures passes of both sizes on a GPU. Collective. Raises `ConfigError` if even these do not fit.

    The first pass is a warm-up, because libraries allocate memory on first use.
    """
    args, cp_size = context.args, info.sizes.cp
    hf_config = read_hf_config(args.hf_checkpoint)
    vocab_size, linear_from = int(hf_config["vocab_size"]), family_of(hf_config).memory_is_linear_from(hf_config)
    sizes = Largest.of(args, cp_size).sizes(args.log_probs_chunk_size, -(-linear_from // cp_size))
    num = num_under_way(info.sizes.pp, len(trainable.ddps), micro_batch_multiple(trainable.ddps))
    peaks = []
    with _as_before(trainable):
        for tokens in (sizes[0], *sizes):
            prepared = rehearsed_batch(num, info.dp_size, tokens * cp_size, vocab_size)
            peaks.append(_peak_of(context, objective, trainable, prepared, tokens))
    return Passes(sizes, (peaks[1], peaks[2]))


def num_under_way(num_stages: int, num_chunks: int, multiple: int) -> int:
    """Returns how many micro-batches fill the pipeline, rounded up to a multiple of `multiple`.

    This is one more than Megatron's warm-up on the first stage, which counts one pass per model chunk if interleaved.
    """
    if num_chunks == 1:
        return max(2, num_stages)
    passes = 2 * (num_stages - 1) + (num_chunks - 1) * multiple + 1
    return -(-max(2, -(-passes // num_chunks)) // multiple) * multiple


def rehearsed_batch(num_micro_batches: int, dp_size: int, tokens: int, vocab_size: int) -> PreparedBatch:
    """Returns a batch with one random sample of `tokens` tokens per micro-batch and DP rank, identical on all ranks."""
    rng, response = np.random.default_rng(0), max(tokens - 1, 1)
    samples = tuple(
        TrainSample(
            tokens=rng.integers(0, vocab_size, response + 1, np.int32),
            loss_mask=np.ones(response, np.float32),
            rollout_log_probs=np.zeros(response, np.float32),
            token_versions=np.ones(response, np.int32),
            reward=0.0,
            group_index=0,
            index=i,
            truncated=False,
        )
        for i in range(num_micro_batches * dp_size)
    )
    ranks = tuple(tuple((rank * num_micro_batches + i,) for i in range(num_micro_batches)) for rank in range(dp_size))
    return PreparedBatch(
        TrainBatch(rollout_id=0, samples=samples),
        Schedule((StepSchedule(ranks, len(samples)),)),
        weights=tuple(TokenWeights(s.loss_mask, 1.0) for s in samples),
        token_shares=(1.0,) * len(samples),
        units=(1.0,) * len(samples),
    )


def refusal(largest: Largest, passes: Passes, fitting: int, *, kept_bytes: int, gpu_bytes: int) -> str:
    """Returns the error message. `kept_bytes` stay on the GPU between passes. `fitting` tokens fit on every rank."""
    peak = passes.peak(largest.tokens)
    return (
        f"micro-batches of up to {largest.tokens:,} tokens do not fit on the GPU: they need {peak / 1e9:.1f} GB "
        f"in addition to {kept_bytes / 1e9:.1f} GB of weights, gradients and optimizer states, but the GPU has "
        f"{gpu_bytes / 1e9:.1f} GB; about {fitting:,} tokens fit: {largest.remedy(fitting)}"
    )


def _peak_of(
    context: StepContext, objective: Objective, trainable: Trainable, prepared: PreparedBatch, tokens: int
) -> int:
    device = context.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        rehearse_step(context, objective, trainable, prepared)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"even a micro-batch of {tokens:,} tokens does not fit on the GPU, which holds {before / 1e9:.1f} GB of "
            "weights and gradients; split the model over more GPUs, or recompute activations "
            "(--recompute-granularity full)"
        ) from error
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def _as_before(trainable: Trainable) -> Iterator[None]:
    """Restores buffers and RNG state after the block, and empties the CUDA cache."""
    buffers: Sequence[tuple[Tensor, Tensor]] = [
        (buffer, buffer.clone()) for chunk in trainable.chunks for buffer in chunk.buffers()
    ]
    generators = generator_state()
    try:
        yield
    finally:
        for buffer, kept in buffers:
            buffer.copy_(kept)
        set_generator_state(*generators)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
