"""`MegatronBackend`: one rank of the trainer. Every method that says "collective" is called on all ranks in one order.

Invariants
1. The whole batch goes to every rank; nothing a rank computes from it depends on how it is cut.
2. `weight_version` names the weights that this rank holds; the weight sync increases it, a checkpoint carries it.
3. On a CPU the same state and the same batch give the same bits.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.compat.megatron_cpu import activate
from slime.config.model_shape import read_hf_config
from slime.core.batch import TrainBatch
from slime.core.errors import ConfigError
from slime.training import hf_weights, rank_state
from slime.training.build import build_model
from slime.training.hf_files import begin_export, commit_export, require_replaceable, write_hf
from slime.training.memory import HostStash
from slime.training.micro_batch import prepare
from slime.training.model_config import training_dtype
from slime.training.optimizer import build_trainable
from slime.training.parallel import ParallelInfo, destroy_process_groups, init_process_groups, seed_everything
from slime.training.step import (
    LogProbs,
    StepContext,
    first_step_gradients,
    forward_log_probs,
    measure_gap,
    train_on,
)
from slime.weights.tables import table_for


class MegatronBackend:
    """Model, optimizer and step of one rank."""

    weight_version: int

    def __init__(
        self,
        args: Any,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        master_address: str,
        master_port: int,
        listener: socket.socket | None = None,
    ) -> None:
        """Joins the process group, builds the model and loads `args.hf_checkpoint`. Collective.

        `args`: the resolved settings (`args.megatron`, `args.device` "cpu" or "cuda", groups training and algorithm).
        Ranks meet at `master_address`, where rank 0 listens: on `listener` (`slime.weights.rendezvous.listen_on`) if
        it holds `master_port` already.
        Raises `ConfigError` for what cannot be trained, `CheckpointError` for a checkpoint that does not fit.
        """
        if args.loss_type not in ("policy_loss", "sft_loss"):
            raise ConfigError(f"got --loss-type {args.loss_type!r}; this release has policy_loss and sft_loss")
        activate(args.device)
        self.args = args
        self.weight_version = 0
        self.device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        megatron = args.megatron
        self.parallel_info: ParallelInfo = init_process_groups(
            self.device,
            rank=rank,
            world_size=world_size,
            master_address=master_address,
            master_port=master_port,
            tp_size=int(megatron.get("tensor_model_parallel_size") or 1),
            timeout_s=60.0 * args.distributed_timeout_minutes,
            listener=listener,
        )
        seed_everything(int(args.seed), self.parallel_info.dp_rank)
        hf_directory = Path(args.hf_checkpoint)
        self.hf_config = read_hf_config(args.hf_checkpoint)
        self.table = table_for(self.hf_config)
        model = build_model(megatron, self.hf_config, self.device)
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._load_hf(hf_directory)
        self._trainable = build_trainable(model, megatron)
        self._context = StepContext(
            args=args,
            device=self.device,
            dtype=training_dtype(megatron),
            dp_rank=self.parallel_info.dp_rank,
            dp_group=mpu.get_data_parallel_group(),
            pad_to_multiple=self.parallel_info.tp_size if model.config.sequence_parallel else 1,
        )
        self._stash = HostStash()
        self._reference = self._load_reference() if self._needs_reference else None

    # --- training -----------------------------------------------------------------------------------------------------

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """All optimizer steps of one batch; the same metrics on every rank. Collective.

        Raises `NumericsError` on every rank, with the weights unchanged by the step at fault, for a non-finite loss or
        gradient and for a log-prob gap beyond the limit; `DataError` or `ConfigError` for a batch that does not fit.
        """
        self._require_awake("train")
        prepared = prepare(batch, self.args, dp_size=self.parallel_info.dp_size)
        model = self._trainable.ddp
        is_policy = self.args.loss_type == "policy_loss"
        ref = None
        if is_policy and self._reference is not None:
            ref = self._with_reference(lambda: forward_log_probs(self._context, model, prepared))
        # With one step its own forward pass gives the old log-probs.
        several = len(prepared.schedule.steps) > 1
        old = forward_log_probs(self._context, model, prepared) if is_policy and several else None
        return train_on(self._context, self._trainable, prepared, old=old, ref=ref, version=self.weight_version)

    def log_probs(self, batch: TrainBatch) -> list[npt.NDArray[np.float32]]:
        """Log-prob of every response token [R] under the current weights, one array per sample. Collective."""
        self._require_awake("log_probs")
        prepared = prepare(batch, self.args, dp_size=self.parallel_info.dp_size, one_step=True)
        own = forward_log_probs(self._context, self._trainable.ddp, prepared)
        gathered: list[Any] = [None] * self.parallel_info.dp_size
        mine = {position: values.cpu().numpy() for position, values in own.items()}
        dist.all_gather_object(gathered, mine, group=self._context.dp_group)
        merged = {position: values for part in gathered for position, values in part.items()}
        return [merged[position] for position in range(len(batch.samples))]

    def measure_gap(self, batch: TrainBatch) -> dict[str, float]:
        """How far this trainer's log-probs are from the engines' on samples of the current version; trains nothing.

        The metrics of `train` that begin with `train/logprob_gap`. Raises `NumericsError` over the limit. Collective.
        """
        self._require_awake("measure_gap")
        prepared = prepare(batch, self.args, dp_size=self.parallel_info.dp_size, one_step=True)
        return measure_gap(self._context, self._trainable.ddp, prepared, version=self.weight_version)

    def gradients(self, batch: TrainBatch) -> dict[str, Tensor]:
        """HF name -> full float32 gradient of a batch's first optimizer step; nothing changes. Collective."""
        self._require_awake("gradients")
        prepared = prepare(batch, self.args, dp_size=self.parallel_info.dp_size)
        local = first_step_gradients(self._context, self._trainable, prepared)
        return dict(hf_weights.iter_hf_tensors(local, self.table, tp_group=mpu.get_tensor_model_parallel_group()))

    # --- weights ------------------------------------------------------------------------------------------------------

    def iter_hf_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor) in table order, on every rank. Collective over TP: exhaust it on all ranks.

        `dtype` converts; None keeps the training dtype. Tensors may alias parameters: read only.
        """
        self._require_awake("iter_hf_tensors")
        group = mpu.get_tensor_model_parallel_group()
        return hf_weights.iter_hf_tensors(self._parameters, self.table, tp_group=group, dtype=dtype)

    def save_hf(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        """Writes weights, config and tokenizer in Hugging Face format, named only when complete. Collective.

        Replaces an earlier export. Raises `CheckpointError`, and touches nothing, if anything else is there.
        """
        require_replaceable(directory)  # on every rank: the others would wait for a sender that has given up
        tensors = self.iter_hf_tensors(dtype)
        if self.parallel_info.rank == 0:
            partial = begin_export(directory)
            write_hf(partial, tensors, assets_from=Path(self.args.hf_checkpoint), dtype=dtype)
            commit_export(partial, directory)
        else:
            for _ in tensors:
                pass
        dist.barrier()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Writes this rank's files into `directory` (see `checkpoint` for the commit). All ranks, no communication."""
        self._require_awake("save")
        rank_state.save_rank(
            directory,
            self._trainable,
            self.parallel_info,
            weight_version=self.weight_version,
            with_optimizer=not getattr(self.args, "no_save_optim", False),
        )

    def load(self, directory: Path) -> None:
        """Restores this rank's files and the weight version. Raises `CheckpointError` if they do not fit this run."""
        self._require_awake("load")
        self.weight_version = rank_state.load_rank(
            directory,
            self._trainable,
            self.parallel_info,
            with_optimizer=not (getattr(self.args, "no_load_optim", False) or getattr(self.args, "finetune", False)),
            with_rng=not (getattr(self.args, "no_load_rng", False) or getattr(self.args, "finetune", False)),
        )

    # --- memory and life ----------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Moves weights and optimizer to the host and frees the gradients; nothing on a CPU."""
        if self.device.type != "cuda" or self._stash.asleep:
            return
        inner = self._trainable.inner.optimizer
        keep = [p.data for p in self._parameters.values()]
        keep += [p.data for group in inner.param_groups for p in group["params"]]
        keep += [v for state in inner.state.values() for v in state.values() if isinstance(v, Tensor)]
        self._stash.put_away(keep, [buffer.grad_data for buffer in self._trainable.ddp.buffers])

    def wake(self) -> None:
        """Undoes `sleep`, bit for bit."""
        if self._stash.asleep:
            self._stash.take_back()

    def close(self) -> None:
        """Leaves the process group."""
        destroy_process_groups()

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _needs_reference(self) -> bool:
        return bool(self.args.use_kl_loss) and self.args.loss_type == "policy_loss"

    def _load_hf(self, directory: Path) -> None:
        info = self.parallel_info
        hf_weights.load_weights(self._parameters, self.table, directory, tp_rank=info.tp_rank, tp_size=info.tp_size)

    def _load_reference(self) -> dict[str, Tensor]:
        """This rank's shard of the reference weights, on the host."""
        directory = Path(self.args.ref_load or self.args.hf_checkpoint)
        if self.args.ref_load and table_for(read_hf_config(self.args.ref_load)).shape != self.table.shape:
            raise ConfigError(
                f"got --ref-load {directory} of another shape than {self.args.hf_checkpoint}; use the same "
                f"family and size"
            )
        host = {name: torch.empty_like(p, device="cpu") for name, p in self._parameters.items()}
        info = self.parallel_info
        hf_weights.load_weights(host, self.table, directory, tp_rank=info.tp_rank, tp_size=info.tp_size)
        return host

    @torch.no_grad()
    def _with_reference(self, compute: Any) -> LogProbs:
        """Runs `compute` with the reference weights in place of the policy's, and puts these back bit for bit."""
        assert self._reference is not None, "no reference model was loaded"
        kept = {name: p.detach().to("cpu", copy=True) for name, p in self._parameters.items()}
        try:
            for name, p in self._parameters.items():
                p.copy_(self._reference[name])
            result: LogProbs = compute()
            return result
        finally:
            for name, p in self._parameters.items():
                p.copy_(kept[name])

    def _require_awake(self, what: str) -> None:
        assert not self._stash.asleep, f"{what} of a sleeping trainer; call wake() first"
