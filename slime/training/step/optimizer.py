"""Megatron's DDP wrappers, distributed optimizers and scheduler, plus a checked optimizer step.

Experts have their own optimizer, because they are sharded over different ranks than the rest of the model.

Invariants
1. Gradients are sums over all ranks that have the parameter. Megatron's division is disabled (`megatron_config`),
   because the loss already includes the denominators of the whole step.
2. A non-finite gradient never reaches the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.compat import megatron_gradient_norm
from slime.core.errors import ConfigError, NumericsError
from slime.settings import Args
from slime.settings.hook_contracts import load_hook
from slime.training.model.megatron_config import ddp_config, optimizer_config
from slime.training.model.policy_model import PolicyModel
from slime.training.state.sharded_model import ShardedModel
from slime.training.step.adamw import HeldAdamW, Holding


@dataclass(frozen=True, slots=True)
class Trainable:
    model: ShardedModel
    ddps: tuple[DistributedDataParallel, ...]
    """One per model chunk on this rank."""
    optimizer: Any
    """Megatron's `ChainedOptimizer` over the `inner` optimizers."""
    scheduler: OptimizerParamScheduler

    @property
    def chunks(self) -> list[PolicyModel]:
        return [ddp.module for ddp in self.ddps]

    @property
    def inner(self) -> list[Any]:
        """The `DistributedOptimizer`s: one for the experts, if any, and one for all other parameters."""
        return list(self.optimizer.chained_optimizers)

    def let_go(self) -> None:
        """Empties the DDP wrappers once they are no longer used.

        Autograd nodes keep the wrappers' hooks alive in a way that the garbage collector cannot see. Without this call,
        the model, buffers and groups would stay in memory, and the groups' threads would run until the process exits.
        """
        for ddp in self.ddps:
            vars(ddp).clear()


def build_trainable(chunks: Sequence[PolicyModel], model: ShardedModel, megatron: Mapping[str, Any]) -> Trainable:
    """Wraps the chunks in DDP and builds their optimizer. Load the weights first: master weights are copied from them.

    Raises `ConfigError` for float16 with experts.
    """
    config = chunks[0].config
    # Buckets let communication start early. Only the first chunk needs them; others overlap with later chunks.
    ddps = tuple(
        DistributedDataParallel(config, ddp_config(megatron), chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    )
    megatron_gradient_norm.activate(next(chunks[0].parameters()).device)
    optimizer = get_megatron_optimizer(optimizer_config(megatron), list(ddps), use_gloo_process_groups=False)
    for inner in optimizer.chained_optimizers:
        if inner.optimizer is not None:
            _choose_adam(inner, Holding.of(megatron))
    if len(optimizer.chained_optimizers) > 1 and megatron.get("fp16"):
        raise ConfigError("--fp16 does not work with MoE: experts have their own optimizer and loss scale; use --bf16")
    no_sync = [ddp.no_sync for ddp in ddps]
    config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    config.grad_scale_func = optimizer.scale_loss
    return Trainable(model, ddps, optimizer, _scheduler(optimizer, megatron))


def _choose_adam(inner: Any, holding: Holding | None) -> None:
    """Uses `HeldAdamW` if `holding` is set, otherwise torch's AdamW with the fused kernel on a GPU.

    Without the fused kernel, torch would run one operation at a time over lists of tensors, and its peak memory would
    include a copy of all weights.
    """
    if holding is not None:
        inner.optimizer = HeldAdamW(inner.optimizer.param_groups, holding)
        return
    for group in inner.optimizer.param_groups:
        if any(parameter.is_cuda for parameter in group["params"]):
            group.update(fused=True, foreach=False)


def _scheduler(optimizer: Any, megatron: Mapping[str, Any]) -> OptimizerParamScheduler:
    """Builds the scheduler. It counts optimizer steps, as do `train_iters` and `lr_warmup_iters`.

    `slime.settings` derives the lengths, the warm-up, and the initial and final weight decay.
    """
    style, warmup = str(megatron["lr_decay_style"]), int(megatron["lr_warmup_iters"])
    decay_steps = int(megatron["lr_decay_iters"] or 0)
    if style == "constant":
        decay_steps = max(decay_steps, warmup + 1)
    elif not decay_steps:
        raise ConfigError(f"--lr-decay-style {style} requires --lr-decay-iters, which is not set")
    elif warmup >= decay_steps:
        raise ConfigError(f"{warmup} warm-up steps cover the whole schedule of {decay_steps}; lower --lr-warmup-iters")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=float(megatron["lr_warmup_init"]),
        max_lr=float(megatron["lr"]),
        min_lr=float(megatron["min_lr"]),
        lr_warmup_steps=warmup,
        lr_decay_steps=decay_steps,
        lr_decay_style=style,
        start_wd=float(megatron["start_weight_decay"]),
        end_wd=float(megatron["end_weight_decay"]),
        wd_incr_steps=max(1, int(megatron["train_iters"] or 1)),
        wd_incr_style=str(megatron["weight_decay_incr_style"]),
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=megatron["lr_wsd_decay_iters"],
        lr_wsd_decay_style=megatron["lr_wsd_decay_style"],
    )


def zero_grad(trainable: Trainable) -> None:
    for ddp in trainable.ddps:
        ddp.zero_grad_buffer()
    trainable.optimizer.zero_grad()


@torch.no_grad()
def reset_moments(trainable: Trainable) -> None:
    """Resets moments and step counts to zero, as before the first update. Master weights and schedule do not change."""
    for inner in trainable.inner:
        if inner.optimizer is None:
            continue
        for group in inner.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
        for state in inner.optimizer.state.values():
            for key in {"step", "exp_avg", "exp_avg_sq"} & state.keys():
                state[key].zero_()


def reduce_grads(trainable: Trainable) -> None:
    """Sums gradients over ranks after the last backward pass of a step.

    The sum is over data-parallel ranks, over tensor-parallel ranks where needed, and over the two copies of a tied
    embedding. Afterwards, each data-parallel rank has its shard of the sum; the rest of its buffers is not summed.
    """
    finalize_model_grads(list(trainable.ddps))


@torch.no_grad()
def apply_update(trainable: Trainable) -> dict[str, float]:
    """Clips gradients, updates the weights and advances the schedule. Returns gradient norm and learning rate.

    The norm is the one before clipping. With float16, the update is skipped if scaled gradients overflow
    (`train/skipped_updates`). Any other non-finite gradient raises `NumericsError` on every rank before any change.
    """
    optimizer = trainable.optimizer
    rate = float(optimizer.param_groups[0]["lr"])
    overflow = bool(optimizer.prepare_grads())
    if overflow:
        zero_grad(trainable)
        return {"train/skipped_updates": 1.0, "train/lr-pg_0": rate}
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        raise NumericsError(
            f"the gradient norm is {norm} although the losses are finite: the backward pass overflowed or produced "
            "NaN; this step has not changed the weights; check the learning rate, the dtype and the last batch"
        )
    for inner in trainable.inner:
        own = inner.get_parameters()
        if own and inner.config.clip_grad > 0.0:
            megatron_optimizer.clip_grad_by_total_norm_fp32(
                own,
                max_norm=inner.config.clip_grad,
                total_norm=norm,
                use_decoupled_grad=inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    if not optimizer.step_with_ready_grads():
        raise NumericsError("Megatron rejected the optimizer step although the gradients are finite")
    trainable.scheduler.step(1)
    return {"train/grad_norm": norm, "train/lr-pg_0": rate}


# User hooks before the trainer's passes (`--custom-megatron-...-path`). They run on every rank and must change the
# model in the same way on all ranks. Each raises `HookError` if its path has no suitable function.


def after_init(args: Args) -> None:
    """Runs after this rank has joined its process groups and before the model is built."""
    if args.custom_megatron_init_path is not None:
        load_hook(args.custom_megatron_init_path, "megatron_init")(args)


def before_log_prob(args: Args, chunks: Sequence[Any], prefix: str) -> None:
    """Runs before a pass without gradients. `prefix` identifies the policy: "", `ref_` or `teacher_`."""
    if args.custom_megatron_before_log_prob_hook_path is not None:
        load_hook(args.custom_megatron_before_log_prob_hook_path, "before_log_prob")(args, list(chunks), prefix)


def before_train_step(args: Args, rollout_id: int, step: int, trainable: Trainable) -> None:
    """Runs before the passes of an optimizer step, while gradients are zero."""
    if args.custom_megatron_before_train_step_hook_path is not None:
        hook = load_hook(args.custom_megatron_before_train_step_hook_path, "before_train_step")
        hook(args, rollout_id, step, list(trainable.ddps), trainable.optimizer, trainable.scheduler)
