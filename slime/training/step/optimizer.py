"""Megatron's DDP wrappers, distributed optimizers and scheduler, Muon, and a checked optimizer step.

Experts have their own optimizer, because they are sharded over different ranks than the rest of the model.

Invariants
1. Gradients are sums over all ranks that have the parameter. Megatron's division is disabled (`megatron_config`),
   because the loss already includes the denominators of the whole step.
2. A non-finite gradient never reaches the weights.
3. Muon's state has one float32 number for each element, sharded like AdamW's moments. Code that handles moments
   (checkpoints, other layouts, memory release) therefore handles it as well.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from slime.compat import megatron_gradients
from slime.core.errors import ConfigError, NumericsError
from slime.models.common.table import EMBEDDING, HEAD
from slime.settings import Args, for_hook
from slime.settings.hook_contracts import load_hook
from slime.training.model.megatron_config import ddp_config, optimizer_config
from slime.training.model.parameter_names import Held
from slime.training.model.policy_model import PolicyModel
from slime.training.state.sharded_model import ShardedModel, ShardedTensor
from slime.training.step.adamw import HeldAdamW, Holding
from slime.weights.hf_shards import by_segments


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
    megatron_gradients.activate_norm(next(chunks[0].parameters()).device)
    optimizer = get_megatron_optimizer(optimizer_config(megatron), list(ddps), use_gloo_process_groups=False)
    muon = MuonSettings.of(megatron)
    for inner in optimizer.chained_optimizers:
        if inner.optimizer is not None:
            _choose_adam(inner, Holding.of(megatron))
            if muon is not None:
                inner.optimizer.register_step_pre_hook(Muon(inner, model, muon))
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
            for key in {"step", "exp_avg", "exp_avg_sq", MOMENTUM} & state.keys():
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


# In Megatron's distributed optimizer, each rank owns a range of a flattened parameter. A stack of experts is a single
# parameter there, so a range can start or end in the middle of an expert.


@dataclass(frozen=True, slots=True)
class Owned:
    """This rank's optimizer state for one shard."""

    optimizer: Any
    main: Tensor
    """The optimizer's main parameter, which contains the shard's weights."""
    within: slice
    """The shard's range in the flattened main parameter."""
    start: int
    """Where `within` starts in the flattened shard."""

    def part(self, like: Tensor) -> Tensor:
        """Returns a flat view of the shard in `like`, a tensor with the layout of the main parameter."""
        return like.view(-1)[self.within]


def owned_part(inner: Sequence[Any], held: Held) -> Owned | None:
    """Returns this rank's optimizer state for a shard, or None if the shard is frozen or owned by another rank.

    `inner`: the `DistributedOptimizer`s to search.
    """
    for one in inner:
        if one.optimizer is None:  # this rank has no trained parameters
            continue
        place = one.model_param_group_index_map.get(held.parameter)
        if place is not None:
            group, index = place
            main = one.optimizer.param_groups[group]["params"][index]
            start = int(one._get_model_param_range_map(held.parameter)["param"].start)
            size = held.of(held.parameter).numel()
            first, end = max(start, held.start), min(start + main.numel(), held.start + size)
            if first >= end:  # this rank's range covers other experts
                return None
            return Owned(one.optimizer, main, slice(first - start, end - start), first - held.start)
    return None


# Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), sharded as in "Muon is Scalable for LLM
# Training" (arXiv:2502.16982). Megatron's own Muon does not support the distributed optimizer, and would update stacked
# experts with AdamW.

MOMENTUM = "momentum_buffer"
"""Key of Muon's state, and its role in a checkpoint."""
COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
"""`--muon-coefficient-type` -> (a, b, c) of each Newton-Schulz iteration, repeated if there are more iterations. The
first is Jordan's; the second is from https://leloykun.github.io/ponder/muon-opt-coeffs/."""


@dataclass(frozen=True, slots=True)
class MuonSettings:
    """The `--muon-...` settings, which mean the same as in Megatron."""

    momentum: float
    nesterov: bool
    split_qkv: bool
    num_steps: int
    coefficients: Sequence[tuple[float, float, float]]
    precision: str
    scale_mode: str
    extra_scale: float
    tp_mode: str

    @classmethod
    def of(cls, megatron: Mapping[str, Any]) -> MuonSettings | None:
        """Returns None without `--optimizer muon`. Settings that Megatron lacks get its hard-coded values."""
        if megatron.get("optimizer") != "muon":
            return None
        return cls(
            momentum=float(megatron["muon_momentum"]),
            nesterov=bool(megatron.get("muon_nesterov", megatron.get("muon_use_nesterov"))),
            split_qkv=bool(megatron["muon_split_qkv"]),
            num_steps=int(megatron["muon_num_ns_steps"]),
            coefficients=COEFFICIENTS[megatron.get("muon_coefficient_type", "quintic")],
            precision=str(megatron["muon_fp32_matmul_prec"]),
            scale_mode=str(megatron["muon_scale_mode"]),
            extra_scale=float(megatron["muon_extra_scale_factor"]),
            tp_mode=str(megatron["muon_tp_mode"]),
        )

    def scale(self, rows: int, columns: int) -> float:
        """Returns the scale of the update of a `rows` x `columns` matrix."""
        scales = {
            "spectral": max(rows, columns) ** 0.5,
            "unit_rms_norm": (rows / columns) ** 0.5,
            "shape_scaling": max(1.0, rows / columns) ** 0.5,
        }
        return scales[self.scale_mode] * self.extra_scale

    def orthogonal(self, matrix: Tensor, *, transpose: bool, group: dist.ProcessGroup | None = None) -> Tensor:
        """Moves the singular values of a float32 `matrix` [m, n] close to 1, by Newton-Schulz iterations.

        The iterations multiply matrices [m, m], or [n, n] with `transpose`. With `group`, each rank has a part of the
        other dimension.
        """
        x = matrix.mT if transpose else matrix
        x = x / _summed(x.square().sum(), group).sqrt().clamp_min(1e-7)
        if self.precision == "medium":
            x = x.bfloat16()
        for step in range(self.num_steps):
            a, b, c = self.coefficients[step % len(self.coefficients)]
            gram = _summed(x @ x.mT, group)
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x.mT if transpose else x).float()


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


@contextlib.contextmanager
def _matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def is_matrix(own: ShardedTensor) -> bool:
    """Returns whether Muon updates a parameter: as in Megatron, any matrix in a layer, including each expert's."""
    return own.trained and len(own.shape) == 2 and own.name not in (EMBEDDING, HEAD)


class Muon:
    """Updates the matrices of one distributed optimizer before its AdamW step, which then skips them."""

    def __init__(self, inner: Any, model: ShardedModel, settings: MuonSettings) -> None:
        self._inner = inner
        self._settings = settings
        self._owned: dict[Tensor, list[tuple[ShardedTensor, Owned]]] = {}
        matrices = [own for own in model.own if is_matrix(own)]
        self._parameters = {id(own.here.parameter) for own in matrices}
        for own in matrices:
            owned = owned_part([inner], own.here)
            if owned is not None:
                self._owned.setdefault(owned.main, []).append((own, owned))
        for main in self._owned:
            inner.optimizer.state[main][MOMENTUM] = torch.zeros_like(main)

    @torch.no_grad()
    def __call__(self, *_step: Any) -> None:
        rule, optimizer = self._settings, self._inner.optimizer
        for main, ((own, _), *_) in self._owned.items():
            grad, buffer = main.grad, own.here.parameter.main_grad  # type: ignore[attr-defined]
            assert grad is not None and grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr(), (
                f"the gradient of {own.name} is not a view of the gradient buffer"
            )
            momentum = optimizer.state[main][MOMENTUM].lerp_(grad, 1 - rule.momentum)
            grad.lerp_(momentum, rule.momentum) if rule.nesterov else grad.copy_(momentum)
        self._gather()
        with _matmul_precision(rule.precision):
            for group in optimizer.param_groups:
                for main in group["params"]:
                    for own, owned in self._owned.get(main, ()):
                        weights = owned.part(main)
                        update = self._update(own).reshape(-1)[owned.start : owned.start + weights.numel()]
                        weights.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        for main in self._owned:
            main.grad = None

    def _gather(self) -> None:
        """All-gathers the gradient buffers, in which each data-parallel rank has set only its own shard."""
        group = self._inner.data_parallel_group
        if group.size() == 1:
            return
        for bucket in (bucket for buffer in self._inner.buffers for bucket in buffer.buckets):
            if any(id(parameter) in self._parameters for parameter in bucket.params):
                shard = bucket.grad_data.chunk(group.size())[group.rank()]
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)

    def _update(self, own: ShardedTensor) -> Tensor:
        """Returns this rank's shard of a matrix's update, which is subtracted after scaling by the learning rate."""
        shard = own.here.of(own.here.parameter.main_grad)  # type: ignore[attr-defined]
        change = partial(self._update_of_part, dim=own.entry.row.dim if own.tp_size > 1 else None)
        if self._settings.split_qkv and own.name.endswith("self_attention.linear_qkv.weight"):
            return by_segments(own.entry.row, shard, own.tp_size, change)
        return change(shard)

    def _update_of_part(self, part: Tensor, dim: int | None) -> Tensor:
        """`part`: this rank's shard of a matrix split along `dim`; the full matrix if `dim` is None."""
        rule = self._settings
        if dim is None or rule.tp_mode == "blockwise":
            rows, columns = part.shape
            return rule.orthogonal(part, transpose=rows > columns) * rule.scale(rows, columns)
        group = mpu.get_tensor_model_parallel_group()
        rows, columns = (size * (group.size() if i == dim else 1) for i, size in enumerate(part.shape))
        if rule.tp_mode == "distributed":
            return rule.orthogonal(part, transpose=dim == 0, group=group) * rule.scale(rows, columns)
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        whole = rule.orthogonal(torch.cat(parts, dim), transpose=rows > columns) * rule.scale(rows, columns)
        return whole.chunk(group.size(), dim)[group.rank()]


# User hooks before the trainer's passes (`--custom-megatron-...-path`). They run on every rank and must change the
# model in the same way on all ranks. Each raises `HookError` if its path has no suitable function.


def after_init(args: Args) -> None:
    """Runs after this rank has joined its process groups and before the model is built."""
    if args.custom_megatron_init_path is not None:
        load_hook(args.custom_megatron_init_path, "megatron_init")(for_hook(args))


def before_log_prob(args: Args, chunks: Sequence[Any], prefix: str) -> None:
    """Runs before a pass without gradients. `prefix` identifies the policy: "", `ref_` or `teacher_`."""
    if args.custom_megatron_before_log_prob_hook_path is not None:
        hook = load_hook(args.custom_megatron_before_log_prob_hook_path, "before_log_prob")
        hook(for_hook(args), list(chunks), prefix)


def before_train_step(args: Args, rollout_id: int, step: int, trainable: Trainable) -> None:
    """Runs before the passes of an optimizer step, while gradients are zero."""
    if args.custom_megatron_before_train_step_hook_path is not None:
        hook = load_hook(args.custom_megatron_before_train_step_hook_path, "before_train_step")
        hook(for_hook(args), rollout_id, step, list(trainable.ddps), trainable.optimizer, trainable.scheduler)
