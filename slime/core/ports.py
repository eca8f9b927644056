"""The ports: what one room needs of another without seeing it. Hand-made fakes satisfy them in tests.

`EngineControl` is the control plane of one SGLang server (implemented over HTTP in `serving/control.py`); the
weight sync in `weights/` talks to engines through it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime.core.topology import EngineLayout, EngineRank

WeightVersion = int
"""Names one synced set of weights. Version 1 is the first weight sync of a run; a resume continues the count."""

TOKEN_VERSIONS_KEY = "token_weight_version"
"""In the `meta_info` of an answer: the weight version of each token, where engines tell it."""

OWN_REQUESTS = "slime-"
"""How the ids of the run's own requests begin: its client goes on where a weight sync ended one of them."""
ASK_AGAIN = "this request was ended because the engine's weights change; ask again"
"""What others read of a request of theirs that a weight sync ended."""
ROUTED_EXPERTS_MARK = "-experts-"
"""In a request's id, and behind it a number: return the routed experts of the tokens from that one on. The id is what
sglang-router 0.3.2 hands on as it is; fields that it does not know it drops."""


class Hasher(Protocol):
    """The digest of one tensor that comes in parts."""

    def add(self, parts: Sequence[Any]) -> None:
        """Tensors of one device that follow what was added, as if all were stacked along dim 0. They may be kept until
        `flush`."""
        ...

    def flush(self) -> None:
        """Reads what is kept and lets it go. On a GPU that is queued; nothing waits."""
        ...

    def finish(self) -> str:
        """Hex digest of all parts."""
        ...


class Digest(Protocol):
    """The function that an engine applies to its resident tensors, on the device that tensors are on."""

    def __call__(self, parts: Any) -> str:
        """Hex digest of a tensor, or of several as if they were stacked along dim 0."""
        ...

    def begin(self) -> Hasher:
        """For a tensor that comes in parts."""
        ...

    def finish(self, hashers: Sequence[Hasher]) -> list[str]:
        """Digests of several, which a GPU makes together."""
        ...


@dataclass(frozen=True, slots=True)
class RankChecksums:
    """What one engine rank holds after fusing and sharding."""

    rank: EngineRank
    layout: EngineLayout
    """As far as the engine says it: `tp_size`, `pp_size` and `dp_size`."""
    checksums: Mapping[str, str]
    """Resident tensor name -> digest."""


class EngineControl(Protocol):
    """Control plane of one inference server.

    Every method raises `EngineError` on refusal and `DeadlineExceeded` on silence.
    """

    @property
    def url(self) -> str: ...

    @property
    def layout(self) -> EngineLayout:
        """How its ranks divide a model."""
        ...

    def pause(self, mode: str = "abort") -> None:
        """Stops serving: `abort` ends running requests as they are; `retract` and `in_place` keep them."""
        ...

    def resume(self) -> None:
        """Serves again."""
        ...

    def flush_cache(self) -> None:
        """Empties the prefix cache and confirms it."""
        ...

    def update_weights_from_tensor(
        self, payloads: Sequence[str], *, load_format: str | None, flush_cache: bool, weight_version: WeightVersion
    ) -> None:
        """`payloads`: one serialised bucket per rank, in the order of `EngineLayout.ranks`."""
        ...

    def init_weights_update_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None: ...

    def destroy_weights_update_group(self, *, group_name: str) -> None: ...

    def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None,
        flush_cache: bool,
        weight_version: WeightVersion,
    ) -> None:
        """`load_format`: None, a broadcast for each tensor; "flattened_bucket", one for all, end to end."""
        ...

    def update_weights_from_disk(
        self, *, model_path: str, flush_cache: bool, weight_version: WeightVersion
    ) -> None: ...

    def weight_checksums(self) -> list[RankChecksums]:
        """Digests of every resident tensor, at least one entry per engine rank."""
        ...

    def release_memory(self, tags: Sequence[str] | None = None) -> None: ...

    def resume_memory(self, tags: Sequence[str] | None = None) -> None: ...
