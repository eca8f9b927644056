"""The trainer against plain torch: optimizer steps are those of `torch.optim.AdamW` on transformers' own model, with
the losses of the papers written down here once more, without a line of slime.

The first test is about the optimizer: clip, schedule, weight decay, fresh gradients in every step. The second is about
what the loss is made of, and from which weights, at which temperature and in which step each part comes: every metric
and every tensor after two batches of several steps. Wiring shows nowhere else: tests of formulas are given their
inputs.

The epsilon of Adam is large, so that a step depends on the size of a gradient and not on its sign alone.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from slime.core.batch import TrainBatch, TrainSample
from slime.training.state import hf_weights
from tests.support.experts import by_checkpoint_name
from tests.support.marks import quick
from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch, with_samples

BATCHES, STEPS_PER_BATCH = 3, 2
RATE, LOWEST, WARMUP, DECAY_STEPS = 0.02, 0.005, 2, 8
CLIP, WEIGHT_DECAY, EPS, BETAS = 0.5, 0.3, 0.1, (0.9, 0.95)
MEGATRON: dict[str, Any] = {
    "lr": RATE,
    "min_lr": LOWEST,
    "lr_decay_style": "linear",
    "lr_warmup_iters": WARMUP,
    "lr_decay_iters": DECAY_STEPS,
    "start_weight_decay": WEIGHT_DECAY,
    "end_weight_decay": WEIGHT_DECAY,
    "weight_decay": WEIGHT_DECAY,
    "adam_eps": EPS,
    "adam_beta1": BETAS[0],
    "adam_beta2": BETAS[1],
    "clip_grad": CLIP,
}


def rate_of(step: int) -> float:
    """Learning rate of an optimizer step, counted from 0: a linear warm-up, then a linear decay."""
    if step <= WARMUP:
        return RATE * step / WARMUP
    return RATE - (RATE - LOWEST) * (step - WARMUP) / (DECAY_STEPS - WARMUP)


def mean_loss(model: Any, samples: tuple[TrainSample, ...]) -> Tensor:
    """Mean negative log-prob of the trained tokens."""
    total, count = torch.zeros(()), 0.0
    for sample in samples:
        tokens, mask = torch.from_numpy(sample.tokens).long(), torch.from_numpy(sample.loss_mask)
        first = sample.num_tokens - sample.response_length
        log_probs = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
        total = total - (log_probs[first - 1 : -1].gather(1, tokens[first:, None])[:, 0] * mask).sum()
        count += float(mask.sum())
    return total / count


def plain_steps(model: Any, batches: list[TrainBatch]) -> Iterator[float]:
    """Trains with nothing but torch; yields each step's norm of the gradient before the clip."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},  # norms
        ],
        betas=BETAS,
        eps=EPS,
    )
    step = 0
    for batch in batches:
        size = len(batch.samples) // STEPS_PER_BATCH
        for first in range(0, len(batch.samples), size):
            for group in optimizer.param_groups:
                group["lr"] = rate_of(step)
            optimizer.zero_grad()
            mean_loss(model, batch.samples[first : first + size]).backward()
            yield float(torch.nn.utils.clip_grad_norm_(parameters, CLIP))
            optimizer.step()
            step += 1


@pytest.mark.parametrize("family", quick(["qwen3", "qwen3_moe"], "qwen3_moe"))
def test_weights_and_norms_are_those_of_torch(family: str, tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    """Law: one norm over all parameters (experts have an optimizer of their own), gradients of this step alone."""
    checkpoint = write_tiny_model(tmp_path / "model", family)
    batches = [random_batch(seed=20 + i) for i in range(BATCHES)]
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    start = {n: t.clone() for n, t in by_checkpoint_name((n, p.detach()) for n, p in model.named_parameters()).items()}
    norms = list(plain_steps(model, batches))
    assert min(norms) > CLIP and max(norms) > 1.2 * min(norms), "a clip that never acts, or always alike"
    want = by_checkpoint_name((n, p.detach()) for n, p in model.named_parameters())

    backend = make_backend(
        checkpoint, megatron=MEGATRON, loss_type="sft_loss", calculate_per_token_loss=True, global_batch_size=4
    )
    for number, batch in enumerate(batches):
        metrics = backend.train(batch)
        mine = slice(STEPS_PER_BATCH * number, STEPS_PER_BATCH * (number + 1))
        assert metrics["train/num_updates"] == STEPS_PER_BATCH
        assert metrics["train/grad_norm"] == pytest.approx(sum(norms[mine]) / STEPS_PER_BATCH, rel=1e-4)
        rates = [rate_of(step) for step in range(*mine.indices(len(norms)))]
        assert metrics["train/lr-pg_0"] == pytest.approx(sum(rates) / STEPS_PER_BATCH, rel=1e-6)
    got = dict(backend.iter_hf_tensors())
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        moved = float((tensor - start[name]).norm())
        assert moved > 0.0, f"{name} has not moved: nothing is compared"
        off = float((got[name] - tensor).norm())
        assert off <= 1e-3 * moved, f"{name} is off by {off / moved:.1e} of its way"


TEMPERATURE = 0.7
STEADY: dict[str, Any] = {
    **{"lr": 0.05, "weight_decay": 0.0, "start_weight_decay": 0.0, "end_weight_decay": 0.0},
    **{"adam_eps": EPS, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "clip_grad": 1e6},
}
"""No clip: it would hide how long a gradient is."""
PUBLIC: dict[str, Any] = {
    "rollout_temperature": TEMPERATURE,
    "global_batch_size": 4,
    "micro_batch_size": 3,
    "eps_clip": 0.1,
    "eps_clip_high": 0.15,
    "megatron": STEADY,
}
KL_LOSS: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"}
PPO: dict[str, Any] = {"advantage_estimator": "ppo", "gamma": 0.97, "lambd": 0.9, "critic_lr": 0.02, "value_clip": 0.02}
UNEVEN: dict[str, Any] = {"use_dynamic_global_batch_size": True, "num_steps_per_rollout": 2}
CASES: dict[str, dict[str, Any]] = {
    "clip and entropy": {"entropy_coef": 0.3, "eps_clip_c": 1.2},
    "the engine's log-probs as old policy": {
        **{"use_rollout_logprobs": True, "use_opsm": True, "opsm_delta": 0.01},
        **{**KL_LOSS, "use_unbiased_kl": True},
    },
    "token weights": {
        **{"use_tis": True, "tis_clip": 1.2, "tis_clip_low": 0.7, "unsampled": True},
        **{**KL_LOSS, "entropy_coef": 0.1},
    },
    "weights of sequences, unbiased KL": {
        **{"use_tis": True, "tis_level": "geometric", "tis_mode": "mask", "tis_clip": 1.1, "tis_clip_low": 0.9},
        **{**KL_LOSS, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True, "unsampled": True},
    },
    "rejection and veto": {
        **{"rejection_level": "geometric", "rejection_low": 0.8, "rejection_high": 1.2, "rejection_veto": 0.55},
        "unsampled": True,
    },
    "teacher and KL in the reward": {
        **{"use_opd": True, "opd_type": "megatron", "opd_kl_coef": 0.4},
        **{"kl_coef": 0.5, "kl_loss_type": "k2", "ref_update_interval": 1},
    },
    "a top-p set": {
        **{"rollout_top_p": 0.9, "use_opd": True, "opd_type": "megatron", "opd_kl_coef": 0.2, "entropy_coef": 0.1},
        **{"kl_coef": 0.2, "kl_loss_type": "k1", "use_tis": True, "tis_clip": 1.2},
    },
    "whitened returns": {
        **{"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "kl_coef": 0.2, "kl_loss_type": "k1"},
        **{"loss_aggregation": "token_mean", "policy_loss": "gspo", "eps_clip": 0.01, "eps_clip_high": 0.02},
    },
    "steps of unequal size": {**UNEVEN, **KL_LOSS, "kl_loss_type": "k2", "entropy_coef": 0.1},
    "a reducer of the user's": {
        **{**UNEVEN, "custom_pg_loss_reducer_function_path": f"{__file__}:hundredths"},
        **{**KL_LOSS, "entropy_coef": 0.1},
    },
    "a critic": {**PPO, "kl_coef": 0.1, "kl_loss_type": "k1", "num_critic_only_steps": 1},
    "a policy that lags": {"keep_old_actor": True, "use_tis": True, "tis_clip": 1.3, "entropy_coef": 0.1},
}
"""Settings by their public names; `unsampled`: some trained tokens have no version."""
QUICK = ("token weights", "teacher and KL in the reward", "steps of unequal size", "a critic")
"""Between them, most of the terms that can be in a loss."""
FOLDERS = {"kl_coef": "ref_load", "use_kl_loss": "ref_load", "use_opd": "opd_teacher_load"}
UNTOLD = ("lr-pg_0", "top_p_outside", "_clamped", "abs_diff_", "stale_tokens", "skipped_updates")
"""Metrics that other tests look at, by the end or a part of their name."""


def hundredths(lengths: Any, response_lengths: Any, masks: list[Tensor], per_token: bool) -> Callable[[Tensor], Tensor]:
    """A reducer: sums over samples."""
    return lambda values: (values * torch.cat(masks)).sum() / 100.0


def of_level(level: str, logs: Tensor, sampled: Tensor) -> Tensor:
    """Log-ratios [R], those of their sequence where the level says so; 0 where no engine sampled."""
    logs = torch.where(sampled, logs, 0.0)
    whole = {"token": logs, "sequence": logs.sum(), "geometric": logs.sum() / sampled.sum().clamp(min=1)}[level]
    return torch.where(sampled, whole, 0.0)


def kl_of(kind: str, d: Tensor) -> Tensor:
    """Schulman's estimators."""
    return {"k1": d, "k2": d**2 / 2}.get(kind, torch.exp(-d) - 1 + d)


class PlainTrainer:
    """GRPO, REINFORCE++ and PPO by their papers, sample after sample."""

    def __init__(self, policy: Any, others: dict[str, Any], settings: dict[str, Any]) -> None:
        self.policy, self.others, self.s = policy, others, defaultdict(lambda: None, settings)
        self.optimizer = self.adam(policy, STEADY["lr"])
        self.versions = {1: copy.deepcopy(policy)}
        self.body, self.head = copy.deepcopy(policy.model), torch.nn.Linear(policy.config.hidden_size, 1)
        self.critic = torch.nn.ModuleDict({"body": self.body, "head": self.head})
        for parameter in self.head.parameters():
            torch.nn.init.zeros_(parameter)
        self.critics = self.adam(self.critic, settings.get("critic_lr", 1.0))
        self.told: dict[str, list[Any]] = {}

    @staticmethod
    def adam(module: Any, rate: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(module.parameters(), lr=rate, betas=BETAS, eps=EPS, weight_decay=0.0)

    def tell(self, **values: Any) -> None:
        """A part of a metric: its mean over all parts is what the trainer reports."""
        for name, value in values.items():
            self.told.setdefault(f"train/{name.replace('__', '-')}", []).append(
                torch.as_tensor(value).detach().double()
            )

    def read(self, model: Any, sample: TrainSample) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs of the top-p set, entropies, log-probs of the whole distribution) [R], at the temperature that was
        sampled with."""
        tokens, first = torch.from_numpy(sample.tokens).long(), sample.num_tokens - sample.response_length
        every = (model(tokens[None]).logits[0, first - 1 : -1] / TEMPERATURE).log_softmax(-1).double()
        whole = every.gather(1, tokens[first:, None])[:, 0]
        mass, order = every.detach().exp().sort(descending=True)
        kept = torch.zeros_like(mass).scatter(
            1, order, (mass.cumsum(-1) - mass <= (self.s["rollout_top_p"] or 1)).double()
        )
        kept.scatter_(1, tokens[first:, None], 1.0)  # what was sampled belongs to it
        return whole - (every.exp() * kept).sum(-1).log(), -(every.exp() * every).sum(-1), whole

    def value(self, sample: TrainSample) -> Tensor:
        """The value before each response token [R]."""
        tokens, first = torch.from_numpy(sample.tokens).long(), sample.num_tokens - sample.response_length
        return self.head(self.body(tokens[None])[0][0, first - 1 : -1])[:, 0].double()

    # --- before the update --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before(self, batch: TrainBatch) -> None:
        """Log-probs, values, advantages and returns of every sample."""
        every, s = batch.samples, self.s
        self.masks = [torch.from_numpy(x.loss_mask).double() for x in every]
        lags = s["keep_old_actor"]
        models = [self.versions[int(x.token_versions.max())] if lags else self.policy for x in every]
        self.old, _, self.whole = map(list, zip(*map(self.read, models, every), strict=True))
        self.rollout = [torch.from_numpy(np.asarray(x.rollout_log_probs)).double() for x in every]
        self.sampled = [torch.from_numpy((x.token_versions >= 0) & (x.loss_mask > 0)) for x in every]
        self.ref = [self.read(self.others["ref_load"], x)[-1] for x in every] if "ref_load" in self.others else None
        self.values = [self.value(x) for x in every] if s["advantage_estimator"] == "ppo" else None
        self.advantages, self.returns = map(list, zip(*(self.aims(batch, i) for i in range(len(every))), strict=True))
        if s["use_opd"]:
            teacher = [self.read(self.others["opd_teacher_load"], x)[-1] for x in every]
            gains = [s["opd_kl_coef"] * (t - o) for t, o in zip(teacher, self.whole, strict=True)]
            self.advantages = [(a + g) * m for a, g, m in zip(self.advantages, gains, self.masks, strict=True)]
        trained = torch.cat(self.masks) > 0
        if s["advantage_estimator"] == "reinforce_plus_plus":
            flat = torch.cat(self.advantages)[trained]
            scale = (flat.var() + 1e-8).sqrt()
            self.advantages = [(a - flat.mean()) / scale * m for a, m in zip(self.advantages, self.masks, strict=True)]
        every_one = torch.cat(self.advantages)[trained]
        self.tell(advantages=every_one.mean(), advantages_std=every_one.std(correction=0))
        self.tell(advantages_min=every_one.min(), advantages_max=every_one.max())
        if s["kl_coef"]:
            self.tell(kl_in_reward=torch.cat([self.kl_before(i) for i in range(len(every))])[trained].mean())
        if self.values:
            self.tell(returns=torch.cat(self.returns)[trained].mean())
        gap = (torch.cat(self.whole) - torch.cat(self.rollout)).abs()[torch.cat(self.sampled)]
        self.tell(train_rollout_logprob_abs_diff=gap.mean())

    def kl_before(self, i: int) -> Tensor:
        """To the reference, of the old policy; zero without one."""
        return kl_of(self.s["kl_loss_type"], self.whole[i] - self.ref[i]) if self.ref else torch.zeros_like(self.old[i])

    def aims(self, batch: TrainBatch, i: int) -> tuple[Tensor, Tensor]:
        """(advantages, returns) [R] of sample i by its estimator, zero where masked."""
        s, sample, mask = self.s, batch.samples[i], self.masks[i]
        cost = (s["kl_coef"] or 0.0) * self.kl_before(i)
        zeros = torch.zeros_like(mask)
        if not sample.is_scored:
            return zeros, zeros
        if s["advantage_estimator"] is None:  # GRPO; siblings are one execution
            peers = {x.index: x.reward for x in batch.samples if x.group_index == sample.group_index and x.is_scored}
            mean, spread = np.mean(list(peers.values())), np.std(list(peers.values()), ddof=1)
            return (float((sample.reward - mean) / (spread + 1e-6)) - cost) * mask, zeros
        values = self.values[i] if self.values else zeros
        decay = s["gamma"] * (s["lambd"] if self.values else 1.0)
        advantages, returns, carried, later, reward = zeros.clone(), zeros.clone(), 0.0, 0.0, sample.reward
        for t in reversed(torch.nonzero(mask)[:, 0].tolist()):  # what is masked takes no time
            carried = reward - float(cost[t]) + s["gamma"] * later - float(values[t]) + decay * carried
            advantages[t], returns[t] = carried, carried + float(values[t])
            later, reward = float(values[t]), 0.0
        return advantages, returns

    # --- the update ---------------------------------------------------------------------------------------------------

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """All steps of a batch; metrics are means over the steps."""
        self.told = {}
        self.before(batch)
        executions = list(dict.fromkeys((x.group_index, x.index) for x in batch.samples))
        num = 2 if self.s["use_dynamic_global_batch_size"] else -(-len(executions) // self.s["global_batch_size"])
        bounds = [len(executions) * k // num for k in range(num + 1)]
        for a, b in itertools.pairwise(bounds):
            here = [i for i, x in enumerate(batch.samples) if (x.group_index, x.index) in executions[a:b]]
            scored = [i for i in here if batch.samples[i].is_scored]
            if self.trains(batch):
                self.step(self.policy, self.optimizer, self.policy_loss(batch, scored), "grad_norm")
            if self.values:
                self.step(self.critic, self.critics, self.value_loss(batch, scored), "critic__grad_norm")
        told = {name: float(torch.stack(parts).mean()) for name, parts in self.told.items()}
        return told | ({"train/num_updates": float(num)} if self.trains(batch) else {})

    def trains(self, batch: TrainBatch) -> bool:
        """Whether the policy is trained, and not the critic alone."""
        return batch.rollout_id >= (self.s["num_critic_only_steps"] or 0)

    def step(self, module: Any, optimizer: Any, loss: Tensor, norm: str) -> None:
        optimizer.zero_grad()
        loss.backward()
        self.tell(**{norm: torch.nn.utils.clip_grad_norm_(module.parameters(), 1e6)})
        optimizer.step()

    def weights(self, batch: TrainBatch, scored: Sequence[int]) -> list[Tensor]:
        """Of the tokens of each sample in the loss of the step."""
        if self.s["loss_aggregation"] == "token_mean":
            return [self.masks[i] / sum(float(self.masks[j].sum()) for j in scored) for i in scored]
        key = {i: (batch.samples[i].group_index, batch.samples[i].index) for i in scored}
        own = {k: sum(float(self.masks[j].sum()) for j in scored if key[j] == k) for k in key.values()}
        return [self.masks[i] / (max(1.0, own[key[i]]) * len(own)) for i in scored]

    def means(self, scored: Sequence[int], parts: dict[str, list[Tensor]]) -> None:
        """Tells the mean of each over the trained tokens of the step."""
        mask = torch.cat([self.masks[i] for i in scored]) > 0
        self.tell(**{name: torch.cat(values)[mask].double().mean() for name, values in parts.items()})

    def policy_loss(self, batch: TrainBatch, scored: Sequence[int]) -> Tensor:
        """Of one step, over the samples that have a reward."""
        s, parts = self.s, defaultdict[str, list[Tensor]](list)
        totals = dict.fromkeys(("loss", "pg_loss", "kl_loss"), torch.zeros((), dtype=torch.float64))
        weights = self.weights(batch, scored)
        num = len({(batch.samples[i].group_index, batch.samples[i].index) for i in scored})
        for i, weight in zip(scored, weights, strict=True):
            log_probs, entropy, _ = self.read(self.policy, batch.samples[i])
            old = self.rollout[i] if s["use_rollout_logprobs"] else self.old[i]
            policy_loss = self.clipped(i, log_probs, old, parts) * self.corrections(i, log_probs.detach(), old, parts)
            extra, kl = -(s["entropy_coef"] or 0.0) * entropy, torch.zeros_like(log_probs)
            if s["use_kl_loss"]:
                kl = kl_of(s["kl_loss_type"], log_probs - self.ref[i])
                kl = kl * (log_probs - old).exp() if s["use_unbiased_kl"] else kl
                parts["ref_log_probs"].append(self.ref[i])
            extra = extra + (s["kl_loss_coef"] or 0.0) * kl
            reduced = (policy_loss * weight).sum()
            if s["custom_pg_loss_reducer_function_path"]:
                reduced = (policy_loss * self.masks[i]).sum() / 100.0 / num
            for name, part in (
                ("loss", reduced + (extra * weight).sum()),
                ("pg_loss", reduced),
                ("kl_loss", kl @ weight),
            ):
                totals[name] = totals[name] + part
            for name, value in (("entropy_loss", entropy), ("log_probs", log_probs)):
                parts[name].append(value.detach())
            parts["rollout_log_probs"].append(torch.where(self.sampled[i], self.rollout[i], 0.0))
            parts["ppo_kl"].append((old - log_probs).detach())
            parts["ois"].append((log_probs - old).exp().detach())
        if not s["use_kl_loss"]:
            del totals["kl_loss"]
        self.means(scored, parts)
        self.tell(**totals)
        return totals["loss"]

    def clipped(self, i: int, log_probs: Tensor, old: Tensor, parts: dict[str, list[Tensor]]) -> Tensor:
        """PPO's loss [R] with clip-higher and dual clip; for GSPO with the ratio of the sequence."""
        s, advantages, logs = self.s, self.advantages[i], log_probs - old
        if s["policy_loss"] == "gspo":
            logs = logs - logs.detach() + of_level("geometric", logs.detach(), self.masks[i] > 0)
        ratio = logs.exp()
        plain, held = -ratio * advantages, -ratio.clamp(1 - s["eps_clip"], 1 + s["eps_clip_high"]) * advantages
        loss, acted = torch.maximum(plain, held), held > plain
        if s["eps_clip_c"]:
            most = -s["eps_clip_c"] * advantages
            above = (advantages < 0) & (loss > most)
            loss, acted = torch.where(above, most, loss), acted | above
        parts["pg_clipfrac"].append(acted.double())
        return loss

    def corrections(self, i: int, log_probs: Tensor, old: Tensor, parts: dict[str, list[Tensor]]) -> Tensor:
        """What multiplies the policy loss of each token [R]; 1 where no engine sampled."""
        s, sampled, out = self.s, self.sampled[i], torch.ones_like(log_probs)
        ratio = self.whole[i] - self.rollout[i]  # of the trainer before the update to the engine
        if s["use_tis"]:
            raw = of_level(s["tis_level"] or "token", ratio, sampled).exp()
            low = s["tis_clip_low"] or 0.0
            held = raw.clamp(low, s["tis_clip"])
            out = out * (torch.where(held == raw, raw, 0.0) if s["tis_mode"] == "mask" else held)
            parts["tis"].append(raw)
            parts["tis_abs"].append((raw - 1).abs())
            parts["tis_clipfrac"].append((held != raw).double())
        if s["rejection_level"]:
            of_sequence = of_level(s["rejection_level"], ratio, sampled).exp()
            vetoed = (of_level("token", ratio, sampled).exp() < s["rejection_veto"]).any()
            outside = (of_sequence < s["rejection_low"]) | (of_sequence > s["rejection_high"])
            kept = 1.0 - ((outside | vetoed) & sampled).double()
            out = out * kept
            parts["rejected"].append(1.0 - kept)
        if s["use_opsm"]:
            mask = self.masks[i]
            far = ((old - log_probs) * mask).sum() > s["opsm_delta"] * mask.sum()
            dropped = (far & (self.advantages[i] < 0)).double()
            out = out * (1.0 - dropped)
            parts["opsm_clipfrac"].append(dropped)
        return out

    def value_loss(self, batch: TrainBatch, scored: Sequence[int]) -> Tensor:
        """The clipped one of PPO, of one step."""
        parts = defaultdict[str, list[Tensor]](list)
        total = torch.zeros((), dtype=torch.float64)
        for i, weight in zip(scored, self.weights(batch, scored), strict=True):
            value, old, aim = self.value(batch.samples[i]), self.values[i], self.returns[i]
            near = old + (value - old).clamp(-self.s["value_clip"], self.s["value_clip"])
            loss = torch.maximum((value - aim) ** 2, (near - aim) ** 2)
            total = total + (loss * weight).sum()
            parts["critic__values"].append(value.detach())
            parts["critic__value_clipfrac"].append(((near - aim) ** 2 > (value - aim) ** 2).double())
        self.means(scored, parts)
        self.tell(critic__value_loss=total)
        return total


def two_batches(plain: PlainTrainer, settings: dict[str, Any]) -> list[TrainBatch]:
    """Eight executions, or seven for steps of unequal size: one has two samples, one no reward, one no trained token.
    What the engine says is near the first policy. Tokens are masked inside, and some of the trained ones not sampled.
    """
    batches = []
    for rollout_id in range(2):
        noise = np.random.default_rng(40 + rollout_id)
        made = random_batch(2, 4, seed=30 + rollout_id)
        samples = [*made.samples, dataclasses.replace(random_batch(seed=50 + rollout_id).samples[0], index=2)]
        samples[2] = dataclasses.replace(samples[2], reward=samples[-1].reward)
        samples[1] = dataclasses.replace(samples[1], reward=float("nan"))
        samples[6] = dataclasses.replace(samples[6], loss_mask=np.zeros_like(samples[6].loss_mask))
        if settings.get("use_dynamic_global_batch_size"):
            del samples[7]
        for i, sample in enumerate(samples):
            with torch.no_grad():
                own = plain.read(plain.policy, sample)[-1].float().numpy()
            versions = sample.token_versions.copy()
            if settings.get("unsampled"):
                versions[[0, -1]] = -1
            elif settings.get("keep_old_actor") and rollout_id and i % 2:
                versions[versions > 0] = 2
            spread = noise.normal(0, 0.3, len(own)).astype(np.float32)
            spread[sample.token_versions != versions] += 2.0
            samples[i] = dataclasses.replace(sample, rollout_log_probs=own + spread, token_versions=versions)
        batches.append(dataclasses.replace(with_samples(made, samples), rollout_id=rollout_id))
    return batches


@pytest.mark.parametrize("case", quick(CASES, *QUICK))
def test_losses_come_from_the_right_weights_tokens_and_steps(
    case: str, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory, make_backend: Callable[..., Any]
) -> None:
    """Law: every metric and every tensor after two batches is that of the papers in plain torch."""
    settings = {**PUBLIC, **CASES[case]}
    load = transformers.AutoModelForCausalLM.from_pretrained
    policy = load(tiny_qwen3, dtype=torch.float32)
    folders = {flag: other_model(tmp_path_factory, flag) for name, flag in FOLDERS.items() if settings.get(name)}
    plain = PlainTrainer(
        policy, {flag: load(folder, dtype=torch.float32) for flag, folder in folders.items()}, settings
    )
    start = {n: p.detach().clone() for n, p in policy.named_parameters()}
    batches = two_batches(plain, settings)
    settings.pop("unsampled", None)
    backend = make_backend(tiny_qwen3, load=str(tiny_qwen3), **{f: str(x) for f, x in folders.items()}, **settings)
    acted = set[str]()
    for batch in batches:
        backend.note_synced()
        want, got = plain.train(batch), backend.train(batch)
        told = {name for name in got if not any(part in name for part in UNTOLD)}
        assert told == want.keys()
        assert {n: got[n] for n in told} == pytest.approx(want, rel=1e-4, abs=1e-5)
        bounds = {name: value for name, value in want.items() if name.endswith(("clipfrac", "rejected"))}
        acted |= {name for name, value in bounds.items() if 0.02 < value < 0.9}
        backend.weight_version += 1
        plain.versions[backend.weight_version] = copy.deepcopy(policy)
        if settings.get("ref_update_interval"):
            plain.others["ref_load"] = copy.deepcopy(policy)
    assert acted == bounds.keys(), f"bounds that never act, or always: {bounds}"
    near(dict(backend.iter_hf_tensors()), dict(policy.named_parameters()), start)
    if backend._critic is not None:
        found = dict(hf_weights.iter_hf_tensors(backend._critic.trainable.model))
        want = {f"model.{n}": p for n, p in plain.body.named_parameters()}
        want |= {f"value_head.{n}": p for n, p in plain.head.named_parameters()}
        near(found, want, {n: start.get(n, torch.zeros_like(p)) for n, p in want.items()})


def other_model(factory: pytest.TempPathFactory, flag: str) -> Path:
    """Another model for each flag, written once."""
    folder = factory.getbasetemp() / f"other_{flag}"
    return folder if folder.exists() else write_tiny_model(folder, "qwen3", seed=5 + len(flag))


def near(got: dict[str, Tensor], want: dict[str, Tensor], start: dict[str, Tensor]) -> None:
    """Each tensor went the same way, within 1/1000 of it."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        way, off = float((tensor - start[name]).norm()), float((got[name] - tensor).norm())
        assert way > 0.0 and off <= 1e-3 * way, f"{name} is off by {off / max(way, 1e-30):.1e} of its way"
