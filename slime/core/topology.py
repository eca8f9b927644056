"""The topology of a fleet: which models are served, by how many engines of which width, for what each.

    model    policy, reference, teacher, ...      a checkpoint; one router in front of its engines
    group    engines of one kind and one width    with SGLang arguments of its own

The engines of a model either answer requests whole, or work in pairs: one reads the prompt and hands keys and values to
another one, which samples. Without `--sglang-config` it is one model, the policy, and one group, or one of each kind.
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
"""Of the only model of a run without `--sglang-config`."""


class Worker(str, Enum):
    """What an engine does of a request."""

    REGULAR = "regular"
    """All of it."""
    PREFILL = "prefill"
    """It reads prompts, and hands keys and values to a decoding engine."""
    DECODE = "decode"
    """It goes on from there."""
    ENCODER = "encoder"
    """It encodes images for the other engines of its model."""
    PLACEHOLDER = "placeholder"
    """Nothing runs: its GPUs are kept free."""


PAIRED = (Worker.PREFILL, Worker.DECODE)
"""Those that answer a request together."""
BOOTSTRAP_OFFSET = 1
"""A prefill engine has a second port, on which decode engines ask it for what it has read: so far behind its first."""


def bootstrap_of(url: str) -> tuple[str, int]:
    """Host and port on which the prefill engine at `url` is asked for what it has read."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None, url
    return parts.hostname, parts.port + BOOTSTRAP_OFFSET


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines that are alike."""

    num_gpus: int
    """Of all of them together."""
    num_gpus_per_engine: int
    worker: Worker = Worker.REGULAR
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """ServerArgs by field name, over those of the run."""
    place: str = field(default="", compare=False)
    """Where it is said, for messages: in the file of `--sglang-config`; empty for the flags."""

    @property
    def runs(self) -> bool:
        """Whether servers are started for it; a placeholder has none."""
        return self.worker is not Worker.PLACEHOLDER


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model, and the engines that serve it."""

    name: str
    path: str
    """A Hugging Face checkpoint folder."""
    groups: tuple[EngineGroup, ...]
    trained: bool = True
    """Whether it is the policy, whose engines get the weights of the trainer, if there is one; others serve what their
    checkpoint has."""

    @property
    def in_pairs(self) -> bool:
        """Whether its prompts are read by other engines than those that sample."""
        return any(group.worker in PAIRED for group in self.groups)


@dataclass(frozen=True, slots=True)
class WantedEngine:
    """One engine before it has a place; a placeholder is one that never runs."""

    model: ServedModel
    group: EngineGroup

    @property
    def num_gpus(self) -> int:
        """Of it alone."""
        return self.group.num_gpus_per_engine

    @property
    def runs(self) -> bool:
        """Whether a server is started for it."""
        return self.group.runs


@dataclass(frozen=True, slots=True)
class Topology:
    """All models of a run."""

    models: tuple[ServedModel, ...]

    @property
    def num_gpus(self) -> int:
        """Of all engines and placeholders."""
        return sum(group.num_gpus for model in self.models for group in model.groups)

    @property
    def policy(self) -> ServedModel | None:
        """The one that is trained; None if all are frozen."""
        return next((model for model in self.models if model.trained), None)

    @property
    def main(self) -> ServedModel | None:
        """The one that rollouts ask: the policy, else the first; None if nothing is served."""
        return self.policy or next(iter(self.models), None)

    def wanted(self) -> Iterator[WantedEngine]:
        """Every engine, in the order in which they get their places: as written."""
        for model in self.models:
            for group in model.groups:
                for _ in range(group.num_gpus // group.num_gpus_per_engine):
                    yield WantedEngine(model, group)


# How the ranks of one inference engine divide a model among them, in SGLang's terms.
#
# An engine of `tp_size` x `pp_size` ranks: each pipeline stage has its layers, and `tp_size` ranks that share them. Of
# these, attention may be shared by fewer (`dp_size` groups with DP attention), and the experts of a layer by whole
# experts in `ep_size` groups.


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Sizes of an engine. Its ranks are numbered stage by stage: rank = pp_rank * tp_size + tp_rank."""

    tp_size: int = 1
    """Ranks of a pipeline stage."""
    pp_size: int = 1
    """Pipeline stages."""
    dp_size: int = 1
    """Groups of a stage's ranks that attend to requests of their own (DP attention); 1: all attend to all."""
    ep_size: int = 1
    """Groups of a stage's ranks that hold whole experts; within a group each expert is split."""
    dp_lm_head: bool = False
    """With DP attention: the output layer is shared by the ranks of a DP group, as the embedding is."""
    whole_dense_mlp: bool = False
    """The MLP of a dense layer of a model with experts is whole on each rank."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty: as even as it gets, the last stages with one more."""
    draft: bool = False
    """Beside the model a layer of multi-token prediction proposes tokens, which its ranks divide in the same way."""

    def __post_init__(self) -> None:
        sizes = (self.tp_size, self.pp_size, self.dp_size, self.ep_size)
        if min(sizes) < 1:
            raise ConfigError(f"got an engine of sizes {self}; each is at least 1")
        for name, size in (("dp_size", self.dp_size), ("ep_size", self.ep_size)):
            if self.tp_size % size:
                raise ConfigError(
                    f"got {name} {size} for an engine with {self.tp_size} ranks in a pipeline stage, which it does not "
                    "divide; choose a divisor"
                )

        if self.stage_layers and len(self.stage_layers) != self.pp_size:
            raise ConfigError(
                f"got the layers of {len(self.stage_layers)} pipeline stages, {self.stage_layers}, for an engine of "
                f"{self.pp_size}; give one number per stage"
            )

    @property
    def num_ranks(self) -> int:
        """GPUs of the engine."""
        return self.tp_size * self.pp_size

    @property
    def attention_tp_size(self) -> int:
        """Ranks that share the attention of a layer."""
        return self.tp_size // self.dp_size

    @property
    def expert_tp_size(self) -> int:
        """Ranks that share one expert."""
        return self.tp_size // self.ep_size

    def ranks(self) -> tuple[EngineRank, ...]:
        """All of them, in order."""
        return tuple(EngineRank(pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size))

    def layers_of(self, pp_rank: int, num_layers: int) -> range:
        """The layers of a stage. Raises `ConfigError` if there are fewer layers than stages, or other than was said."""
        if num_layers < self.pp_size:
            raise ConfigError(f"got {self.pp_size} pipeline stages for {num_layers} layers; give fewer stages")
        each, more = divmod(num_layers, self.pp_size)
        sizes = self.stage_layers or (each,) * (self.pp_size - more) + (each + 1,) * more
        if sum(sizes) != num_layers:
            raise ConfigError(
                f"got pipeline stages of {sizes} layers for a model of {num_layers}; make them sum up to {num_layers}"
            )
        ends = (0, *accumulate(sizes))
        return range(ends[pp_rank], ends[pp_rank + 1])

    def __str__(self) -> str:
        named = (("TP", self.tp_size), ("PP", self.pp_size), ("DP", self.dp_size), ("EP", self.ep_size))
        return " ".join(f"{name} {size}" for name, size in named if size > 1 or name == "TP")


@dataclass(frozen=True, slots=True, order=True)
class EngineRank:
    """Where a rank of an engine stands."""

    pp_rank: int
    """Its pipeline stage."""
    tp_rank: int
    """Its number in the stage."""

    def __str__(self) -> str:
        return f"{self.tp_rank}" if not self.pp_rank else f"{self.tp_rank} of stage {self.pp_rank}"


ONE_RANK = EngineLayout()
"""An engine that holds a model whole."""
