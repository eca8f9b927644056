"""Fleet topology: which engines serve which models, and how a model is sharded over an engine's ranks.

    model    policy, reference, teacher, ...      a checkpoint; one router in front of its engines
    group    engines of one kind and size         with its own SGLang arguments

Each engine either serves complete requests or works in a pair (PD disaggregation): a prefill engine processes the
prompt and transfers the KV cache to a decode engine, which samples. Without `--sglang-config`, there is only the policy
model, with one engine group per kind.
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
EVAL_FLEET = "eval_fleet"
"""Name of the model that the engines of `--eval-fleet` serve: the policy, at the version of its last evaluation."""


class Worker(str, Enum):
    REGULAR = "regular"
    PREFILL = "prefill"
    """Processes prompts and transfers the KV cache to a decode engine."""
    DECODE = "decode"
    """Samples responses from a prefill engine's KV cache."""
    ENCODER = "encoder"
    """Encodes images for the other engines of its model."""
    PLACEHOLDER = "placeholder"
    """Reserves GPUs without running an engine on them."""


PAIRED = (Worker.PREFILL, Worker.DECODE)
"""Worker kinds that serve a request together."""
BOOTSTRAP_OFFSET = 1
"""Offset of a prefill engine's bootstrap port from its HTTP port. Decode engines use it to set up KV transfers."""


def bootstrap_of(url: str) -> tuple[str, int]:
    """Returns (host, bootstrap port) of the prefill engine at `url`."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None, url
    return parts.hostname, parts.port + BOOTSTRAP_OFFSET


@dataclass(frozen=True, slots=True)
class EngineGroup:
    num_gpus: int
    """Total number of GPUs over all engines in the group."""
    num_gpus_per_engine: int
    worker: Worker = Worker.REGULAR
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """ServerArgs field name -> value that overrides the run's setting."""
    place: str = field(default="", compare=False)
    """Position in the `--sglang-config` file, for messages. Empty if the group was configured with flags."""

    @property
    def runs(self) -> bool:
        """False for placeholders, which do not run servers."""
        return self.worker is not Worker.PLACEHOLDER


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    path: str
    """A Hugging Face checkpoint folder."""
    groups: tuple[EngineGroup, ...]
    trained: bool = True
    """Whether the engines receive the trainer's weights. Other models serve their checkpoint."""
    only_evaluates: bool = False
    """Whether these are the engines of `--eval-fleet`, which receive weights only for evaluations."""

    @property
    def in_pairs(self) -> bool:
        """Whether pairs of prefill and decode engines serve the model's requests."""
        return any(group.worker in PAIRED for group in self.groups)


@dataclass(frozen=True, slots=True)
class WantedEngine:
    """An engine or placeholder to which no GPUs have been assigned yet."""

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
        """Total number of GPUs, including placeholders, without the GPUs of `--eval-fleet`."""
        return sum(group.num_gpus for model in self.models for group in model.groups if not model.only_evaluates)

    @property
    def num_eval_gpus(self) -> int:
        """Number of GPUs of `--eval-fleet`."""
        return sum(group.num_gpus for model in self.models for group in model.groups if model.only_evaluates)

    @property
    def policy(self) -> ServedModel | None:
        """The trained model that generates, or None if all models are frozen."""
        return next((model for model in self.models if model.trained and not model.only_evaluates), None)

    @property
    def eval_fleet(self) -> ServedModel | None:
        """The engines of `--eval-fleet`; None if evaluations run on the policy's engines."""
        return next((model for model in self.models if model.only_evaluates), None)

    @property
    def main(self) -> ServedModel | None:
        """The model used for rollouts: the policy, or else the first model. None if there are no models."""
        return self.policy or next(iter(self.models), None)

    def wanted(self) -> Iterator[WantedEngine]:
        """Yields all engines and placeholders in file order, which is also the placement order."""
        for model in self.models:
            for group in model.groups:
                for _ in range(group.num_gpus // group.num_gpus_per_engine):
                    yield WantedEngine(model, group)


# How a model is sharded over an engine's ranks, in SGLang's terms. The layers are divided into `pp_size` pipeline
# stages of `tp_size` ranks each, and every layer is split over the ranks of its stage. With DP attention, the ranks of
# a stage form `dp_size` groups, and attention is split within each group. For MoE layers, the ranks of a stage form
# `ep_size` groups, and the experts are distributed over the groups.


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Parallel sizes of an engine. Ranks are numbered stage by stage: rank = pp_rank * tp_size + tp_rank."""

    tp_size: int = 1
    """Ranks per pipeline stage."""
    pp_size: int = 1
    dp_size: int = 1
    """DP attention groups per stage. Each group processes its own requests."""
    ep_size: int = 1
    """Expert-parallel groups per stage. Each expert belongs to one group and is split over that group's ranks."""
    dp_lm_head: bool = False
    """With DP attention: whether the LM head, like the embedding, is split only within each DP group."""
    whole_dense_mlp: bool = False
    """In an MoE model: whether each rank holds the complete MLP of dense layers."""
    stage_layers: tuple[int, ...] = ()
    """Number of layers per pipeline stage. Empty: an even split, where the last stages get one more layer if needed."""
    draft: bool = False
    """Whether the engine has a multi-token prediction layer, which is sharded in the same way."""

    def __post_init__(self) -> None:
        sizes = (self.tp_size, self.pp_size, self.dp_size, self.ep_size)
        if min(sizes) < 1:
            raise ConfigError(f"all parallel sizes of an engine must be at least 1, got {self}")
        for name, size in (("dp_size", self.dp_size), ("ep_size", self.ep_size)):
            if self.tp_size % size:
                raise ConfigError(
                    f"{name} {size} does not divide the {self.tp_size} ranks of a pipeline stage; choose a divisor"
                )

        if self.stage_layers and len(self.stage_layers) != self.pp_size:
            raise ConfigError(
                f"{self.stage_layers} has {len(self.stage_layers)} numbers, but the engine has {self.pp_size} pipeline "
                "stages; give one number per stage"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks, which is also the number of GPUs."""
        return self.tp_size * self.pp_size

    @property
    def attention_tp_size(self) -> int:
        """Number of ranks over which attention is split."""
        return self.tp_size // self.dp_size

    @property
    def expert_tp_size(self) -> int:
        """Number of ranks over which each expert is split."""
        return self.tp_size // self.ep_size

    def ranks(self) -> tuple[EngineRank, ...]:
        return tuple(EngineRank(pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size))

    def layers_of(self, pp_rank: int, num_layers: int) -> range:
        """Returns the layers of a stage. Raises `ConfigError` for too many stages or a wrong sum of `stage_layers`."""
        if num_layers < self.pp_size:
            raise ConfigError(f"cannot split {num_layers} layers into {self.pp_size} pipeline stages; use fewer stages")
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
    """Rank within the stage."""

    def __str__(self) -> str:
        return f"{self.tp_rank}" if not self.pp_rank else f"{self.tp_rank} of stage {self.pp_rank}"


ONE_RANK = EngineLayout()
"""Layout of a single-rank engine."""


# How a trained model is sharded over the training ranks, in Megatron's terms.


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """The parallel sizes of one model. The data-parallel size is world size / (tp * pp * cp)."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    """Number of model chunks per pipeline rank (interleaved pipelining)."""
    cp: int = 1
    ep: int = 1
    """Expert-parallel size. Outside of expert layers, these ranks are data-, context- and tensor-parallel ranks."""

    @classmethod
    def of(cls, megatron: Mapping[str, Any]) -> ParallelSizes:
        """Reads the sizes from Megatron's settings. Raises `ConfigError` if they are invalid."""

        def size(name: str) -> int:
            return int(megatron.get(name) or 1)

        out = cls(
            tp=size("tensor_model_parallel_size"),
            pp=size("pipeline_model_parallel_size"),
            vp=size("virtual_pipeline_model_parallel_size"),
            cp=size("context_parallel_size"),
            ep=size("expert_model_parallel_size"),
        )
        if min(out.tp, out.pp, out.vp, out.cp, out.ep) < 1:
            raise ConfigError(f"each parallel size must be at least 1, got {out}")
        if out.vp > 1 and out.pp == 1:
            raise ConfigError(
                f"--virtual-pipeline-model-parallel-size {out.vp} requires more than one pipeline stage; set "
                "--pipeline-model-parallel-size or remove the flag"
            )
        return out

    def dp(self, world_size: int) -> int:
        """Returns the data-parallel size. Raises `ConfigError` if the sizes do not divide the world size."""
        model = self.tp * self.pp * self.cp
        if world_size % model:
            raise ConfigError(
                f"--tensor-model-parallel-size {self.tp}, --pipeline-model-parallel-size {self.pp} and "
                f"--context-parallel-size {self.cp} do not match {world_size} training ranks; their product {model} "
                "must divide the number of ranks"
            )
        if world_size % (self.ep * self.pp):
            raise ConfigError(
                f"--expert-model-parallel-size {self.ep} and --pipeline-model-parallel-size {self.pp} do not match "
                f"{world_size} training ranks; their product must divide the number of ranks"
            )
        return world_size // model
