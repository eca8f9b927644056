"""`MegatronBackend`: one rank of the trainer. All ranks must call the methods marked "Collective" in the same order.

Invariants
1. Every rank receives the full batch, and results do not depend on how the batch is split.
2. `weight_version` is the version of this rank's weights; the train actor increments it, and checkpoints store it.
3. Training on a CPU is bitwise reproducible.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import socket
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms import Algorithm
from slime.algorithms.advantages import Arrays
from slime.algorithms.advantages.returns import Together
from slime.algorithms.whole_batch import BatchLogProbs
from slime.compat.megatron_cpu import activate
from slime.core.batch import TrainBatch, trains_any
from slime.core.topology import ParallelSizes
from slime.models import family_of, load_family, table_for
from slime.models.common.flops import tflops_per_gpu
from slime.models.common.packed_attention import ALL_TO_ALL
from slime.ops import select
from slime.settings import Args
from slime.settings.conditions import fine_tunes
from slime.training.model.build import build_model
from slime.training.model.megatron_config import trained_config, training_dtype
from slime.training.model.trained import choose_trained
from slime.training.parallel import (
    ParallelInfo,
    be_deterministic,
    destroy_process_groups,
    init_process_groups,
    seed_everything,
)
from slime.training.rehearsal import training_peak
from slime.training.state import hf_weights
from slime.training.state.adapter_files import peft_knows, write_peft
from slime.training.state.checkpoint import Seal
from slime.training.state.hf_files import CHAT_TEMPLATE_FILE, Writers, export, with_duplicates_of
from slime.training.state.outgoing import TrainerWeights
from slime.training.state.rank_state import Kept, Snapshot, load_rank, rank_state
from slime.training.state.sharded_model import ShardedModel
from slime.training.state.sleeping import Held, MemoryPlan, Parts, build_sleeper
from slime.training.step.critic import Critic
from slime.training.step.loss import LogProbs, trained_objective
from slime.training.step.micro_batch import PreparedBatch, prepare, with_advantages
from slime.training.step.non_finite import check_log_probs
from slime.training.step.optimizer import Trainable, after_init, build_trainable
from slime.training.step.profiles import Profiles
from slime.training.step.reference_policies import REFERENCE, TEACHER, OtherPolicies, needs_old_pass
from slime.training.step.routing import BatchRouting
from slime.training.step.staging import Staging
from slime.training.step.train_step import (
    OwnTime,
    StepContext,
    forward_batch,
    mean_loss,
    measure_mismatch,
    micro_batch_multiple,
    train_on,
)
from slime.training.step.vision_encoder import Sight
from slime.weights.send_plan import NUM_BUFFERS

logger = logging.getLogger(__name__)


class MegatronBackend:
    weight_version: int
    model: ShardedModel
    sight: Sight

    def __init__(
        self,
        args: Args,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        master_address: str,
        master_port: int,
        listener: socket.socket | None = None,
    ) -> None:
        """Joins the process group, builds the models and loads their checkpoints. Collective.

        Ranks connect to `master_address`. Rank 0 listens there on `listener` (`slime.weights.rendezvous.listen_on`), or
        on `master_port` if `listener` is None. Raises `ConfigError` if the model or a setting is not supported, and
        `CheckpointError` if a checkpoint does not match this run.
        """
        activate(args.device)
        self.args = args
        self._algorithm = Algorithm.of(args)
        self.weight_version = 0
        self.device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # On by default; the convolution over image patches must stay float32.
            torch.backends.cudnn.allow_tf32 = False
        megatron = args.megatron
        modes = {"invariant": args.true_on_policy, "fp8": bool(megatron.get("fp8"))}
        choices = select.use(self.device, training_dtype(megatron), args.kernels, **modes)
        if rank == 0:
            logger.info("kernels: %s", "; ".join(map(str, choices)))
        if megatron.get("deterministic_mode"):
            be_deterministic()
        self.parallel_info: ParallelInfo = init_process_groups(
            self.device,
            rank=rank,
            world_size=world_size,
            master_address=master_address,
            master_port=master_port,
            sizes=ParallelSizes.of(megatron),
            timeout_s=60.0 * args.distributed_timeout_minutes,
            listener=listener,
        )
        seed_everything(int(args.seed), self.parallel_info.dp_rank)
        after_init(args)
        self._profiles = Profiles(args, rank, self.device)
        if args.model_family is not None:
            load_family(args.model_family)
        self.hf_config = trained_config(args)
        self.table = table_for(self.hf_config)
        self._flops = family_of(self.hf_config, args).flops(self.hf_config)
        chunks = build_model(args, self.hf_config, self.device)
        self.model = choose_trained(chunks, self.table, args)
        hf_weights.load_weights(self.model.base, Path(args.initial_weights))
        self._trainable = build_trainable(chunks, self.model, megatron)
        self.sight = Sight.of(args, self.hf_config, chunks, self.device)
        self._others = OtherPolicies(args, self._trainable)
        self._critic = Critic.of(args, self._algorithm, self.device)
        self._staging = Staging(self.device) if self.device.type == "cuda" else None
        self._sleeper = build_sleeper(args, self.table, self._parts, self.device)

    @cached_property
    def own_time(self) -> OwnTime:
        """Measures this rank's passes."""
        return OwnTime(self.device)

    # --- training -----------------------------------------------------------------------------------------------------

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Runs all optimizer steps for one batch and returns the same metrics on every rank. Collective.

        A batch without a trained token changes nothing, and `train/num_updates` is 0.

        Raises `NumericsError` on every rank if a loss or gradient is not finite (the failed step does not change the
        weights) or if the train-inference mismatch exceeds the limit. Raises `DataError` or `ConfigError` if the
        settings do not allow the batch.
        """
        self._require_awake("train")
        with self._profiles.step(batch.rollout_id):
            return self._train(batch)

    def _train(self, batch: TrainBatch) -> dict[str, float]:
        if not trains_any(batch.samples):
            self._others.note_trained(batch.rollout_id)
            return {"train/num_updates": 0.0}
        context, version = self._context, self.weight_version
        first = self._prepare(batch)
        with self._profiles.part("train_log_probs", batch.rollout_id):
            prepared = self._with_advantages(first)
        metrics = dict(prepared.aims.metrics) if prepared.aims is not None else {}
        if prepared.shared is not None:
            metrics["train/shared_tokens"] = prepared.shared_fraction
        # Check the policy first, even if only the critic is trained: a failed check must leave the critic unchanged.
        if self._critic is None or batch.rollout_id >= self.args.num_critic_only_steps:
            objective = trained_objective(self.args, self._algorithm)
            with self._profiles.part("train_actor", batch.rollout_id):
                metrics |= train_on(context, objective, self._trainable, prepared, version=version)
        else:
            evaluation, chunks = LogProbs(self.args), self._trainable.ddps
            metrics |= measure_mismatch(context, evaluation, chunks, prepared, version=version)
        if first.routing is not None:
            own = first.schedule.of_rank(context.dp_rank) if context.reports else ()
            metrics |= first.routing.metrics(batch, own)
        if self._critic is not None:
            metrics |= self._critic.train(context, dataclasses.replace(prepared, routing=None), version=version)
        self._others.note_trained(batch.rollout_id)
        return metrics

    def tflops(self, batch: TrainBatch, time_s: float) -> float:
        """Returns the TFLOP/s per rank if training the policy on `batch` takes `time_s` seconds."""
        if not trains_any(batch.samples):
            return 0.0
        flops = sum(self._flops.forward(s.num_tokens, num_logits=s.response_length) for s in batch.samples)
        return tflops_per_gpu(flops, time_s=time_s, num_gpus=self.parallel_info.world_size)

    def measure_mismatch(self, batch: TrainBatch) -> dict[str, float]:
        """Compares the trainer's log-probs with the engines' log-probs, without training. Collective.

        The samples must come from the current weight version. Returns the `train` metrics whose names start with
        `train/train_rollout_logprob_abs_diff`. Raises `NumericsError` if the mismatch exceeds the limit.
        """
        self._require_awake("measure_mismatch")
        prepared, evaluation = self._prepare(batch, one_step=True), LogProbs(self.args)
        return measure_mismatch(self._context, evaluation, self._trainable.ddps, prepared, version=self.weight_version)

    def measure_loss(self, batch: TrainBatch) -> dict[str, float]:
        """Returns `num_tokens` and `loss` (mean negative log-prob of the trained tokens), without training. Collective.

        The result is the same on every rank and under every parallel layout. Gradients, optimizer state and RNG state
        do not change. Raises `NumericsError` if a log-prob is not finite.
        """
        self._require_awake("measure_loss")
        prepared = self._prepare(batch, one_step=True, sampled=False)
        (log_probs,) = forward_batch(self._context, LogProbs(self.args, whole=True), self._trainable.ddps, prepared)
        check_log_probs(prepared, BatchLogProbs(old=log_probs), None, run_dir=self.args.run_dir)
        return mean_loss(log_probs, batch)

    def _prepare(self, batch: TrainBatch, *, one_step: bool = False, sampled: bool = True) -> PreparedBatch:
        config = self._trainable.chunks[0].config
        prepared = prepare(
            batch,
            self.args,
            self._algorithm,
            dp_size=self.parallel_info.dp_size,
            cp_size=self.parallel_info.sizes.cp,
            splits_heads=config.cp_comm_type == ALL_TO_ALL,
            micro_batch_multiple=micro_batch_multiple(self._trainable.ddps),
            flops=self._flops if self.args.balance_data else None,
            one_step=one_step,
        )
        routing = BatchRouting.of(self.args, batch, config, self.device) if sampled else None
        return dataclasses.replace(prepared, routing=routing, images=self.sight.of_batch(batch))

    def _with_advantages(self, prepared: PreparedBatch) -> PreparedBatch:
        """Runs the forward passes that the loss needs before the update, then computes the advantages."""
        args, context = self.args, self._context
        if fine_tunes(args):
            return with_advantages(prepared, args, self._algorithm, BatchLogProbs())
        old = self._old_log_probs(context, prepared)
        if old and prepared.routing is not None:
            prepared = dataclasses.replace(prepared, routing=prepared.routing.afterwards())
        by_themselves = dataclasses.replace(prepared, routing=None)
        log_probs = BatchLogProbs(
            old=old[0] if old else None,
            old_full=old[1] if len(old) > 1 else None,
            ref=self._others.log_probs(REFERENCE, context, by_themselves),
            teacher=self._others.log_probs(TEACHER, context, by_themselves),
        )
        values = self._critic.values(context, by_themselves) if self._critic is not None else None
        check_log_probs(prepared, log_probs, values, run_dir=args.run_dir)
        together = Together(dist.get_rank(), dist.get_world_size(), self._added)
        return with_advantages(prepared, args, self._algorithm, log_probs, values, together)

    def _added(self, array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Collective. Returns the sum of an array over all ranks."""
        if dist.get_world_size() == 1:
            return array
        total = torch.from_numpy(array).to(self.device)
        dist.all_reduce(total)
        summed: npt.NDArray[np.float64] = total.cpu().numpy()
        return summed

    def _old_log_probs(self, context: StepContext, prepared: PreparedBatch) -> tuple[Arrays, ...]:
        """Returns the policy's log-probs before the update (`LogProbs`), or () if the training pass computes them."""
        if self.args.keep_old_actor:
            return self._others.old_log_probs(context, prepared)
        if needs_old_pass(self.args, self._algorithm, prepared):
            return forward_batch(context, LogProbs(self.args), self._trainable.ddps, prepared)
        return ()

    # --- weights ------------------------------------------------------------------------------------------------------

    def iter_hf_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, full tensor) in table order on every rank. Collective: all ranks must exhaust the iterator.

        Tensors are cast to `dtype`, or keep the training dtype if it is None. Adapters are merged one tensor at a time.
        Tensors may alias parameters, so callers must not modify them.
        """
        self.require_weights()
        return hf_weights.iter_hf_tensors(self.model, dtype=dtype, merged=True)

    def outgoing(self, dtype: torch.dtype | None = None) -> TrainerWeights:
        """Returns this rank's weights with adapters merged. They are read lazily, when they are sent. Collective.

        Tensors are cast to `dtype`, or keep the training dtype if it is None.
        """
        return TrainerWeights(self.model, dtype)

    def require_weights(self) -> None:
        """Asserts that the weights are on the GPU, ready to be sent."""
        assert self._sleeper.held is not Held.NOTHING, "a sleeping trainer has no weights; call wake() first"

    def note_synced(self) -> None:
        self._others.note_synced(self.weight_version)

    def save_hf(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        """Writes weights, config and tokenizer in Hugging Face format. Collective.

        Ranks take turns writing to a shared temporary folder, which is renamed to `directory` once it is complete.
        Adapters are merged, and are also saved separately in the subfolder `adapter`. An earlier export is replaced. If
        `directory` contains anything else, raises `CheckpointError` and changes nothing.
        """
        info, model, source = self.parallel_info, self.model, Path(self.args.hf_checkpoint)

        def rest(folder: Path) -> None:
            adapters = hf_weights.iter_hf_tensors(model.adapters, dtype=dtype)
            if info.rank == 0 and model.adapter_scale is not None and peft_knows(model.table):
                scale, base = model.adapter_scale, str(source.resolve())
                write_peft(folder / "adapter", model.table, adapters, scale=scale, base=base)
            if info.rank == 0 and self.args.chat_template is not None:
                shutil.copyfile(self.args.chat_template, folder / CHAT_TEMPLATE_FILE)
            for _ in adapters:  # run the remaining collectives
                pass

        writers = Writers(info.rank, info.world_size, dist.barrier)
        tensors = with_duplicates_of(source, self.iter_hf_tensors(dtype), self.table.duplicates)
        export(directory, tensors, source=source, carried=self.table.carries, writers=writers, rest=rest)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def snapshot(self, *, on_host: bool = True) -> Snapshot:
        """Returns this rank's state for a checkpoint. All ranks must call it, but they do not communicate.

        With `on_host` the state is copied, so training can continue. Otherwise it must be written before it changes.
        """
        self._require_awake("save")
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # another thread reads the tensors
        with_optimizer = not self.args.no_save_optim
        states = {
            folder: rank_state(kept, weight_version=self.weight_version, with_optimizer=with_optimizer)
            for folder, kept in self._kept.items()
        }
        return Snapshot({folder: state.on_host() if on_host else state for folder, state in states.items()})

    def save(self, directory: Path) -> dict[str, Seal]:
        """Writes this rank's files to `directory`. Returns hashes for `checkpoint.commit`. All ranks must call it."""
        return self.snapshot(on_host=False).write(directory)

    def load(self, directory: Path) -> None:
        """Restores a checkpoint of any layout. All ranks must call it. Raises `CheckpointError` on a mismatch."""
        self._require_awake("load")
        args = self.args
        for folder, kept in self._kept.items():
            self.weight_version = load_rank(
                directory / folder,
                dataclasses.replace(kept, other_policies={}) if args.finetune else kept,
                seed=int(args.seed),
                with_optimizer=not (args.finetune or args.no_load_optim),
                with_rng=not (args.finetune or args.no_load_rng),
            )

    # --- memory and shutdown ------------------------------------------------------------------------------------------

    def rehearse(self) -> None:
        """Predicts the GPU memory of the largest micro-batch for `memory_plan`; see `slime.training.rehearsal`.

        Collective; does nothing on a CPU. If the micro-batch does not fit, raises `ConfigError` with the number of
        tokens that do.
        """
        if self.device.type == "cuda":
            objective, later = trained_objective(self.args, self._algorithm), self._parts().num_later_bytes
            if not self.args.offload_train:  # buckets and the memory of recorded fills are kept between weight syncs
                later += (NUM_BUFFERS + 1) * self.args.update_weight_buffer_size
            peak = training_peak(self._context, objective, self._trainable, self.parallel_info, later)
            self._sleeper.expect_in_training(peak)

    def keep_weights(self) -> dict[str, float]:
        """Offloads everything but the policy's weights. Returns the peak GPU memory of the phase that just ended."""
        self.sight.close()
        return self._sleeper.keep_weights()

    def sleep(self) -> dict[str, float]:
        """Offloads everything from the GPU. Returns the peak GPU memory of the phase that just ended."""
        self.sight.close()
        return self._sleeper.sleep()

    def wake(self) -> dict[str, float]:
        """Undoes `keep_weights` or `sleep`. The restored state is bitwise equal, except that gradients are zero."""
        return self._sleeper.wake()

    @property
    def state(self) -> list[Tensor]:
        """This rank's weights and optimizer states, on the device or on the host. A critic's are included."""
        parts = self._parts()
        return [*parts.weights, *parts.others]

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """Returns this rank's GPU memory in each phase of a colocated step, or None if no engine shares the GPU."""
        return self._sleeper.plan

    def close(self) -> None:
        self._sleeper.close()
        for trainable in self._trainables.values():
            trainable.let_go()
        destroy_process_groups()

    # --- private ------------------------------------------------------------------------------------------------------

    @property
    def _context(self) -> StepContext:
        sequence_parallel = self._trainable.chunks[0].config.sequence_parallel
        context = StepContext.of(self.args, self.device, self.parallel_info, sequence_parallel, self._staging)
        return dataclasses.replace(context, own_time=self.own_time)

    @property
    def _trainables(self) -> dict[str, Trainable]:
        return {"": self._trainable} | ({"critic": self._critic.trainable} if self._critic is not None else {})

    @property
    def _kept(self) -> dict[str, Kept]:
        args, info = self.args, self.parallel_info
        kept = {"": Kept(self._trainable, info, Path(args.hf_checkpoint), self._others.lasting)}
        if self._critic is not None:
            kept["critic"] = Kept(self._critic.trainable, info, Path(str(args.critic_load)))
        return kept

    def _parts(self) -> Parts:
        return Parts.of(self._trainable, self._critic.trainable if self._critic is not None else None)

    def _require_awake(self, what: str) -> None:
        assert self._sleeper.held is Held.ALL, f"cannot {what}: the trainer is asleep; call wake() first"
