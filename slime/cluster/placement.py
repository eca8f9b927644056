"""Which process gets which slot: a pure plan, made before anything starts.

A *slot* is one GPU, or on a machine without GPUs a share of its cores. Training ranks take the first slots; engines
take the slots after them, or the same ones when colocated.

Invariants
1. Every training rank has exactly one slot and every engine `num_gpus_per_engine` consecutive ones.
2. Without `colocate` no slot is used twice; with it, a slot holds at most one training rank and one engine rank.
3. The threads of processes that compute at the same time never add up to more than the cores (one at least each).
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """One inference engine."""

    index: int
    slots: tuple[int, ...]
    """Slots of its ranks, in order."""
    colocated: bool
    """True if a training rank lives on one of its slots."""
    num_threads: int
    """CPU threads per engine rank (meaningful on a CPU only)."""


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Slots of the whole run."""

    num_slots: int
    train_slots: tuple[int, ...]
    """Slot of each training rank; empty without training."""
    engines: tuple[EnginePlacement, ...]
    train_threads: int
    """CPU threads per training rank (meaningful on a CPU, and for an optimizer in host memory)."""


def plan_placement(
    *,
    num_train: int,
    num_rollout: int,
    num_per_engine: int,
    colocate: bool,
    num_cores: int,
    max_threads: int | None = None,
) -> PlacementPlan:
    """Plans `num_train` training ranks and `num_rollout` engine slots in engines of `num_per_engine`.

    `num_cores`: cores of this machine; `max_threads`: most threads of one process. Raises `ConfigError` if the engine
    slots do not divide into engines.
    """
    if num_rollout % max(num_per_engine, 1):
        raise ConfigError(
            f"got {num_rollout} rollout GPUs for engines of {num_per_engine}, which does not divide them; "
            "change --rollout-num-gpus or --rollout-num-gpus-per-engine"
        )
    first = 0 if colocate else num_train
    num_slots = max(num_train, first + num_rollout)
    # Colocated phases alternate, so each phase may use all cores; decoupled ones run side by side.
    sharing_train = num_train if colocate else num_train + num_rollout
    sharing_rollout = num_rollout if colocate else num_train + num_rollout
    most = max_threads or num_cores
    engine_threads = max(1, min(most, num_cores // max(sharing_rollout, 1)))
    train_threads = max(1, min(most, num_cores // max(sharing_train, 1)))
    engines = []
    for index in range(num_rollout // num_per_engine if num_per_engine else 0):
        slots = tuple(range(first + index * num_per_engine, first + (index + 1) * num_per_engine))
        engines.append(EnginePlacement(index, slots, colocate and slots[0] < num_train, engine_threads))
    return PlacementPlan(num_slots, tuple(range(num_train)), tuple(engines), train_threads)
