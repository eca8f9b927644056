"""How the ranks of one inference engine divide a model among them, in SGLang's terms.

An engine of `tp_size` x `pp_size` ranks: each pipeline stage has its layers, and `tp_size` ranks that share them. Of
these, attention may be shared by fewer (`dp_size` groups with DP attention), and the experts of a layer by whole
experts in `ep_size` groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from slime.core.errors import ConfigError


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
