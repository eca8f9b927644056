"""What of a training rank is on its GPU: all of it, the policy's weights alone, or nothing.

    wake            all of it               to train, to load, to save
    keep_weights    the policy's weights    beside an engine that takes its own back: a weight sync, an export
    sleep           nothing                 while engines generate

Consumes: calls of the backend, in any order, on one thread. Produces: free GPU memory, and peaks as metrics. Waits for:
the copies, and once for the host arena to be pinned.

Invariants
1. After `wake` every bit is as it was, but gradients, which are zeros.
2. What both weights and optimizer hold (float32 training) stays as long as the weights do.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.models.common.table import FamilyTable
from slime.settings import Args
from slime.training.state.host_arena import ALIGNMENT, HostArena, pin_for, room_of
from slime.training.state.memory import HostStash, num_bytes_of, storages_of
from slime.training.state.memory_plan import MemoryPlan, RankBytes, engine_bytes, predicted_peaks
from slime.training.step.held_adam import HeldAdamW
from slime.training.step.optimizer import Trainable
from slime.weights.quantised.formats import format_of_folder


class Held(enum.Enum):
    """What is on the GPU."""

    ALL = enum.auto()
    WEIGHTS = enum.auto()
    NOTHING = enum.auto()


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one rank, by when they have to be on the GPU."""

    weights: Sequence[Tensor]
    """The policy's, which engines are sent."""
    others: Sequence[Tensor]
    """Optimizer states, which may view weights, and a critic's weights."""
    gradients: Sequence[Tensor]
    num_later_bytes: int = 0
    """Of states that the first optimizer step makes."""
    num_later: int = 0
    """How many tensors these are."""

    @classmethod
    def of(cls, policy: Trainable, critic: Trainable | None) -> Parts:
        """As they are now."""
        others: list[Tensor] = []
        gradients: list[Tensor] = []
        later_bytes, num_later = 0, 0
        for trainable in (policy, critic):
            if trainable is None:
                continue
            if trainable is critic:
                others += [parameter.data for parameter in trainable.model.parameters]
            for optimizer in (inner.optimizer for inner in trainable.inner if inner.optimizer is not None):
                masters = [p for group in optimizer.param_groups for p in group["params"]]
                others += [p.data for p in masters]
                others += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
                missing = [p for p in masters if "exp_avg" not in optimizer.state.get(p, {})]
                later_bytes += (
                    optimizer.first_step_bytes()
                    if isinstance(optimizer, HeldAdamW)
                    else sum(2 * p.numel() * p.element_size() for p in missing)
                )
                num_later += len(missing)
            buffers = [b for ddp in trainable.ddps for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
            gradients += [buffer.grad_data for buffer in buffers]
        weights = [parameter.data for parameter in policy.model.parameters]
        return cls(weights, others, gradients, later_bytes, 3 * num_later)  # two moments and a count

    def apart(self) -> list[Tensor]:
        """Of `others`, those that view no weight."""
        held = {w.untyped_storage().data_ptr() for w in self.weights}
        return [t for t in self.others if t.untyped_storage().data_ptr() not in held]

    def num_bytes(self, device: torch.device) -> RankBytes:
        """What they take on the device, with what comes later."""
        return RankBytes(
            weights=num_bytes_of(self.weights, device),
            gradients=num_bytes_of(self.gradients, device),
            others=num_bytes_of(self.apart(), device) + self.num_later_bytes,
        )

    def arena_bytes(self, device: torch.device) -> int:
        """Room for all of them but the gradients on the host."""
        now = sum(room_of(s.nbytes()) for s in storages_of([*self.weights, *self.apart()], device))
        return now + room_of(self.num_later_bytes) + ALIGNMENT * self.num_later


class Sleeper:
    """Moves the parts of one rank. `active`: else (on a CPU) nothing moves, and everything is always there."""

    def __init__(self, parts: Callable[[], Parts], device: torch.device, *, active: bool, prepares: bool) -> None:
        """`parts`: asked each time, for an optimizer makes its states when it first steps.

        `prepares`: the host arena is made in the background from now on; else when it is first needed.
        """
        self._parts, self._device, self._active = parts, device, active
        self.plan: MemoryPlan | None = None
        """What the phases take; peaks that are seen are reported beside it."""
        self._held = Held.ALL
        self._arena: HostArena | None = None
        self._stash: HostStash | None = None
        if active and prepares:
            self._prepare()

    @property
    def held(self) -> Held:
        return self._held

    def keep_weights(self) -> dict[str, float]:
        """Drops gradients and puts away all but the policy's weights, or brings these alone back.

        Returns the peak of the phase that ends; {} if it was so.
        """
        if not self._active or self._held is Held.WEIGHTS:
            return {}
        if self._held is Held.ALL:
            seen, parts = self._seen("train"), self._parts()
            self._prepare().put_away(parts.apart(), parts.gradients)
        else:
            seen = self._seen("generate")
            self._prepare().take_back_last()  # `sleep` puts them away last, by themselves
        self._held = Held.WEIGHTS
        self._reset_peak()
        return seen

    def sleep(self) -> dict[str, float]:
        """Puts everything away. The peaks of the phases that end; {} if it sleeps already."""
        if not self._active or self._held is Held.NOTHING:
            return {}
        seen = self._seen("sync") if self._held is Held.WEIGHTS else self.keep_weights()
        self._prepare().put_away(self._parts().weights)
        self._held = Held.NOTHING
        self._reset_peak()
        return seen

    def wake(self) -> dict[str, float]:
        """Brings everything back; the most that was on the GPU meanwhile. {} if it is awake."""
        if self._held is Held.ALL:
            return {}
        slept = self._seen("generate") if self._held is Held.NOTHING else {}
        self._prepare().take_back()
        self._held = Held.ALL
        self._reset_peak()
        return slept

    def expect_in_training(self, num_bytes: int) -> None:
        """What training was found to take, activations included, enters the plan."""
        if self.plan is not None:
            self.plan = self.plan.with_training(num_bytes)

    def close(self) -> None:
        """Gives the host memory back."""
        if self._arena is not None:
            self._arena.close()
            self._arena = self._stash = None

    def _prepare(self) -> HostStash:
        if self._stash is None:
            self._arena = HostArena(self._parts().arena_bytes(self._device), pin_for(self._device))
            self._stash = HostStash(self._arena, self._device)
        return self._stash

    def _seen(self, phase: str) -> dict[str, float]:
        """The peak of the phase that ends, and beside it what was predicted."""
        on_gpu = self._device.type == "cuda"
        peaks = {"bytes": float(torch.cuda.max_memory_allocated(self._device))} if on_gpu else {}
        if self.plan is not None:
            peaks["predicted_bytes"] = float(self.plan.peaks[phase].trainer)
        return {f"perf/memory_{phase}_{name}": value for name, value in peaks.items()}

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


def build_sleeper(args: Args, table: FamilyTable, parts: Callable[[], Parts], device: torch.device) -> Sleeper:
    """Of a rank that is built. Where its GPU is lent, host memory is pinned from now on, and the phases are planned."""
    active = device.type == "cuda"
    sleeper = Sleeper(parts, device, active=active, prepares=args.offload_train)
    if active and args.offload_train:
        gpu_bytes = torch.cuda.get_device_properties(device).total_memory
        engine = engine_bytes(
            table,
            itemsize=getattr(torch, args.sglang["dtype"]).itemsize,
            tp_size=args.rollout_num_gpus_per_engine,
            gpu_bytes=gpu_bytes,
            fraction=args.sglang.get("mem_fraction_static"),
            quantised=format_of_folder(args.hf_checkpoint),
        )
        bucket_bytes = args.update_weight_buffer_size
        peaks = predicted_peaks(parts().num_bytes(device), engine, bucket_bytes=bucket_bytes)
        sleeper.plan = MemoryPlan(gpu_bytes, peaks)
    return sleeper
