"""How the ranks of one inference engine divide a model among them, in SGLang's terms.

An engine of `tp_size` x `pp_size` ranks: each pipeline stage has its layers, and `tp_size` ranks that share them. Of
these, attention may be shared by fewer (`dp_size` groups with DP attention), and the experts of a layer by whole
experts in `ep_size` groups.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def __str__(self) -> str:
        named = (("TP", self.tp_size), ("PP", self.pp_size), ("DP", self.dp_size), ("EP", self.ep_size))
        return " ".join(f"{name} {size}" for name, size in named if size > 1 or name == "TP")
