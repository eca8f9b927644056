"""The topology of a fleet: which engines serve which models, and how the ranks of an engine divide a model.

    model    policy, reference, teacher, ...      a checkpoint; one router in front of its engines
    group    engines of one kind and size         with its own SGLang arguments

The engines of a model either serve whole requests or work in pairs: one engine reads the prompt and passes keys and
values to a second engine, which samples. Without `--sglang-config` there is one model, the policy, with one group, or
one group per kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from slime.core.errors import ConfigError

DEFAULT_NAME = "default"
"""Name of the only model of a run without `--sglang-config`."""


class Worker(str, Enum):
    REGULAR = "regular"
    PREFILL = "prefill"
    """Reads prompts and hands keys and values to a decoding engine."""
    DECODE = "decode"
    """Samples, starting from a prefill engine's keys and values."""
    ENCODER = "encoder"
    """Encodes images for the other engines of its model."""
    PLACEHOLDER = "placeholder"
    """Reserves GPUs that stay free. No engine runs there."""


PAIRED = (Worker.PREFILL, Worker.DECODE)
"""Kinds of workers that serve a request together."""
BOOTSTRAP_OFFSET = 1
"""A prefill engine's second port minus its first. Decode engines fetch keys and values from the second port."""


def bootstrap_of(url: str) -> tuple[str, int]:
    """Returns (host, second port) of the prefill engine at `url`."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None, url
    return parts.hostname, parts.port + BOOTSTRAP_OFFSET


@dataclass(frozen=True, slots=True)
class EngineGroup:
    num_gpus: int
    """Total number of GPUs of all engines in the group."""
    num_gpus_per_engine: int
    worker: Worker = Worker.REGULAR
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Field name of ServerArgs -> value that overrides the run's value."""
    place: str = field(default="", compare=False)
    """The group's position in the `--sglang-config` file, for messages; empty if the group comes from flags."""

    @property
    def runs(self) -> bool:
        """False for a placeholder, which has no servers."""
        return self.worker is not Worker.PLACEHOLDER


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    path: str
    """A Hugging Face checkpoint folder."""
    groups: tuple[EngineGroup, ...]
    trained: bool = True
    """Whether this is the policy, whose engines get the trainer's weights. Other engines serve their checkpoint."""

    @property
    def in_pairs(self) -> bool:
        """Whether pairs of prefill and decode engines serve the model's requests."""
        return any(group.worker in PAIRED for group in self.groups)


@dataclass(frozen=True, slots=True)
class WantedEngine:
    """An engine or placeholder that has no GPUs yet."""

    model: ServedModel
    group: EngineGroup

    @property
    def num_gpus(self) -> int:
        return self.group.num_gpus_per_engine

    @property
    def runs(self) -> bool:
        return self.group.runs


@dataclass(frozen=True, slots=True)
class Topology:
    models: tuple[ServedModel, ...]

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs, placeholders included."""
        return sum(group.num_gpus for model in self.models for group in model.groups)

    @property
    def policy(self) -> ServedModel | None:
        """The trained model; None if all are frozen."""
        return next((model for model in self.models if model.trained), None)

    @property
    def main(self) -> ServedModel | None:
        """The model that rollouts use: the policy, else the first; None if nothing is served."""
        return self.policy or next(iter(self.models), None)

    def wanted(self) -> Iterator[WantedEngine]:
        """Yields all engines and placeholders in the order of the file, which is the order of placement."""
        for model in self.models:
            for group in model.groups:
                for _ in range(group.num_gpus // group.num_gpus_per_engine):
                    yield WantedEngine(model, group)


# How the ranks of an engine divide a model, in SGLang's terms. Each of `pp_size` pipeline stages has some of the
# layers, and `tp_size` ranks that split these layers. With DP attention, the ranks of a stage form `dp_size` groups,
# and the ranks of each group split the attention. For MoE layers, the ranks of a stage form `ep_size` groups that
# divide the experts.


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The parallel sizes of an engine. Ranks are numbered stage by stage: rank = pp_rank * tp_size + tp_rank."""

    tp_size: int = 1
    """Ranks per pipeline stage."""
    pp_size: int = 1
    dp_size: int = 1
    """Groups of ranks per stage for DP attention; each group attends to its own requests."""
    ep_size: int = 1
    """Groups of ranks per stage for experts; each group has whole experts, and its ranks split each expert."""
    dp_lm_head: bool = False
    """With DP attention: whether the ranks of a DP group split the output layer, as they split the embedding."""
    whole_dense_mlp: bool = False
    """In an MoE model: whether each rank has the whole MLP of dense layers."""
    stage_layers: tuple[int, ...] = ()
    """Layers per pipeline stage. Empty: layers are divided evenly, with one more in the last stages if needed."""
    draft: bool = False
    """Whether the engine has a multi-token prediction layer, which its ranks divide in the same way."""

    def __post_init__(self) -> None:
        sizes = (self.tp_size, self.pp_size, self.dp_size, self.ep_size)
        if min(sizes) < 1:
            raise ConfigError(f"the engine sizes {self} must all be at least 1")
        for name, size in (("dp_size", self.dp_size), ("ep_size", self.ep_size)):
            if self.tp_size % size:
                raise ConfigError(
                    f"{name} {size} does not divide the {self.tp_size} ranks of a pipeline stage; choose a divisor"
                )

        if self.stage_layers and len(self.stage_layers) != self.pp_size:
            raise ConfigError(
                f"{self.stage_layers} has {len(self.stage_layers)} numbers, but the engine has {self.pp_size} pipeline "
                "stages; write one number per stage"
            )

    @property
    def num_ranks(self) -> int:
        """The number of ranks, which equals the number of GPUs."""
        return self.tp_size * self.pp_size

    @property
    def attention_tp_size(self) -> int:
        """The number of ranks that split the attention of a layer."""
        return self.tp_size // self.dp_size

    @property
    def expert_tp_size(self) -> int:
        """The number of ranks that split one expert."""
        return self.tp_size // self.ep_size

    def ranks(self) -> tuple[EngineRank, ...]:
        return tuple(EngineRank(pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size))

    def layers_of(self, pp_rank: int, num_layers: int) -> range:
        """Returns the layers of a stage. Raises `ConfigError` for more stages than layers, or a wrong sum."""
        if num_layers < self.pp_size:
            raise ConfigError(f"{self.pp_size} pipeline stages are too many for {num_layers} layers; use fewer stages")
        each, more = divmod(num_layers, self.pp_size)
        sizes = self.stage_layers or (each,) * (self.pp_size - more) + (each + 1,) * more
        if sum(sizes) != num_layers:
            raise ConfigError(
                f"pipeline stages of {sizes} layers do not add up to the {num_layers} layers of the model"
            )
        ends = (0, *accumulate(sizes))
        return range(ends[pp_rank], ends[pp_rank + 1])

    def __str__(self) -> str:
        named = (("TP", self.tp_size), ("PP", self.pp_size), ("DP", self.dp_size), ("EP", self.ep_size))
        return " ".join(f"{name} {size}" for name, size in named if size > 1 or name == "TP")


@dataclass(frozen=True, slots=True, order=True)
class EngineRank:
    pp_rank: int
    tp_rank: int
    """The rank's number within its stage."""

    def __str__(self) -> str:
        return f"{self.tp_rank}" if not self.pp_rank else f"{self.tp_rank} of stage {self.pp_rank}"


ONE_RANK = EngineLayout()
"""The layout of an engine whose only rank has the whole model."""
