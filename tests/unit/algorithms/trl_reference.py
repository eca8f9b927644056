"""trl's loss code as a reference: random batches, and a stand-in for the trainer that trl's own methods run on.

Nothing of ours is imported here, and trl only by who asks for it.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Random quantities of S sequences in rows of width W; numbers of real tokens are `lengths`."""

    num_generations: int
    lengths: list[int]
    mask: Tensor
    """[S, W] 1 = trained; 0 inside a sequence is a tool's token, beyond its length padding."""
    real: Tensor
    """[S, W] bool: inside the sequence."""
    new: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor
    entropy: Tensor
    advantages: Tensor
    """[S]"""
    eps_low: float
    eps_high: float
    delta: float
    tau: tuple[float, float]
    beta: float
    """Coefficient of KL or entropy; 0 in every third batch."""
    clip: tuple[float, float]
    opsm_delta: float
    max_length: int

    def flat(self, x: Tensor, *, poison: bool = True) -> Tensor:
        """[R] of a [S, W], with NaN where a token is not trained."""
        x = x.masked_fill(self.mask == 0, float("nan")) if poison else x
        return x[self.real]


@functools.cache
def random_batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    num_generations = int(rng.integers(2, 5))
    size = num_generations * int(rng.integers(1, 3))
    lengths = [int(n) for n in rng.integers(1, 6, size)]
    width = max(lengths)
    real = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    mask = torch.from_numpy((rng.random((size, width)) < 0.8).astype(np.int64)) * real

    def normal(scale: float) -> Tensor:
        return torch.from_numpy(rng.normal(0, scale, (size, width)))

    old = -torch.from_numpy(rng.exponential(1.5, (size, width)))
    drift = 0.0 if seed % 10 == 0 else 0.4  # every tenth batch is exactly on-policy, where both branches of a clip tie
    low, high = sorted(rng.uniform(0.05, 0.5, 2))
    return Batch(
        num_generations=num_generations,
        lengths=lengths,
        mask=mask,
        real=real,
        new=old + normal(drift),
        old=old,
        ref=old + normal(0.5),
        rollout=old + normal(0.5),
        entropy=torch.from_numpy(rng.exponential(1.0, (size, width))),
        advantages=torch.from_numpy(np.where(rng.random(size) < 0.1, 0.0, rng.normal(0, 1.5, size))),
        eps_low=float(low),
        eps_high=float(high),
        delta=float(1 + high + rng.uniform(0.01, 0.5)),
        tau=(float(rng.uniform(0.5, 2)), float(rng.uniform(0.5, 2))),
        beta=float(rng.uniform(0.01, 0.5)) if seed % 3 else 0.0,
        clip=(float(rng.uniform(0.3, 0.9)), float(rng.uniform(1.1, 2.0))),
        opsm_delta=float(rng.uniform(0.01, 0.4)),
        max_length=width + int(rng.integers(0, 3)),
    )


@dataclass(frozen=True)
class Case:
    """One setting of trl and the same setting of ours."""

    policy: Any
    """Our loss, for the test."""
    aggregation: str
    """Ours."""
    loss_type: str
    """trl's."""
    level: str = "token"
    dual: bool = False
    kl: bool = False
    unbiased: bool = False
    entropy: bool = False
    opsm: bool = False
    mismatch: tuple[str, str] | None = None
    """(level, mode) of the correction from sampler to trainer."""


_ONE_PROCESS = SimpleNamespace(
    num_processes=1,
    process_index=0,
    device=torch.device("cpu"),
    sync_gradients=True,
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
)
"""accelerate's object for a single process."""
_SCORING: dict[str, Any] = {
    "num_iterations": 1,
    "multi_objective_aggregation": "sum_then_normalize",
    "reward_weights": torch.ones(1, dtype=torch.float64),
    "reward_func_names": ["r"],
    "ref_model": object(),
    "environment_factories": None,
    "environments": None,
    "tools": None,
    "_tokenizer": SimpleNamespace(pad_token_id=0),
    "pad_to_multiple_of": None,
    "mask_truncated_completions": False,
    "log_multimodal": False,
    "_pending_extra_logs": {},
    "_pending_metrics": {},
}
"""What trl's scoring of a batch looks up and no case changes: one reward function, text only, no tools."""


@dataclass(frozen=True)
class Trl:
    """The trainer class of trl, and stand-ins for the `self` that its methods see."""

    trainer: Any

    def stand_in(self, case: Case, b: Batch, num_micro_batches: int = 1, scale: str = "group") -> Any:
        """An object with the settings of `case` in trl's names."""
        correction = "_".join(case.mismatch) if case.mismatch else None
        args = SimpleNamespace(
            delta=b.delta if case.dual else None,
            use_bias_correction_kl=case.unbiased,
            sapo_temperature_pos=b.tau[0],
            sapo_temperature_neg=b.tau[1],
            steps_per_generation=num_micro_batches,
            gradient_accumulation_steps=num_micro_batches,
            per_device_train_batch_size=len(b.lengths),
            gradient_checkpointing_kwargs=None,
        )
        me = SimpleNamespace(
            **_SCORING,
            args=args,
            accelerator=_ONE_PROCESS,
            model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
            get_off_policy_mask=self.trainer.get_off_policy_mask,
            loss_type=case.loss_type,
            importance_sampling_level=case.level,
            off_policy_mask_threshold=b.opsm_delta if case.opsm else None,
            epsilon_low=b.eps_low,
            epsilon_high=1 + b.eps_high if case.loss_type == "cispo" else b.eps_high,
            beta=b.beta if case.kl else 0.0,
            use_vllm=case.mismatch is not None,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=correction,
            vllm_importance_sampling_clip_min=b.clip[0],
            vllm_importance_sampling_clip_max=b.clip[1],
            max_completion_length=b.max_length,
            current_gradient_accumulation_steps=num_micro_batches,
            top_entropy_quantile=1.0,
            _entropy_bonus_enabled=case.entropy,
            use_adaptive_entropy=False,
            entropy_coef=b.beta,
            aux_loss_enabled=False,
            num_generations=b.num_generations,
            scale_rewards=scale,
        )
        me._metrics = {"train": defaultdict(list)}
        me._logs = {"prompt": [], "completion": [], "advantages": [], "rewards": defaultdict(list), "extra": {}}
        return me

    def loss(self, case: Case, b: Batch, new: Tensor, inputs: dict[str, Tensor], num_micro_batches: int = 1) -> Tensor:
        """trl's loss of the step: the sum over its micro-batches, each of whole sequences."""
        me = self.stand_in(case, b, num_micro_batches)
        losses = []
        for rows in torch.arange(len(b.lengths)).chunk(num_micro_batches):
            me._get_per_token_logps_and_entropies = lambda *_, rows=rows, **__: (new[rows], b.entropy[rows], None)
            part = {k: v if v.dim() == 0 else v[rows] for k, v in inputs.items()}
            losses.append(self.trainer._compute_loss(me, None, part))
        return torch.stack(losses).sum()

    def scored(self, case: Case, b: Batch, rewards: Tensor, scale: str = "group") -> dict[str, Tensor]:
        """trl's inputs of the loss from sequences and rewards: advantages, importance ratios, old log-probs."""
        me = self.stand_in(case, b, scale=scale)
        rows = [m[:n].tolist() for m, n in zip(b.mask, b.lengths, strict=True)]
        sampler = [x[:n].tolist() for x, n in zip(b.rollout, b.lengths, strict=True)]
        ids = [[7] * n for n in b.lengths]
        prompts = [[3]] * len(ids)
        me._generate = lambda _: (prompts, ids, rows, [""] * len(ids), sampler, {}, None, None)
        me._calculate_rewards = lambda *_: rewards[:, None]
        me._get_per_token_logps_and_entropies = lambda model, *_, **__: (
            b.ref if model is me.ref_model else b.old,
            None,
            None,
        )
        return self.trainer._generate_and_score_completions(me, [{"prompt": "p"}] * len(ids))
