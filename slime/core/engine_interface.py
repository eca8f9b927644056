"""The interfaces to an engine, for packages that must not import each other. Tests implement them with small fakes.

`EngineControl` is the control plane of one SGLang server. `serving/control.py` implements it over HTTP, and `weights/`
uses nothing else to reach engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime.core.topology import EngineLayout, EngineRank

WeightVersion = int
"""Number of a weight sync. The first sync of a run is version 1; a resumed run continues the count."""

TOKEN_VERSIONS_KEY = "token_weight_version"
"""The key in a response's `meta_info` that has the weight version of each token, if the engine reports it."""

SENDER_HEADER = "x-slime-sender"
"""The header of a control call that names its sender, usually by the id of the run."""

OWN_REQUESTS = "slime-"
"""Prefix of the ids of the run's own requests. If a weight sync ends such a request, the run's client continues it."""
ASK_AGAIN = "this request was ended because the engine's weights change; send it again"
"""The response to other clients when a weight sync ends their request."""
ROUTED_EXPERTS_MARK = "-experts-"
"""The mark before a number N in a request's id, which requests the routed experts from token N on. It is part of the id
because sglang-router 0.3.2 forwards ids but drops unknown fields."""


class Hasher(Protocol):
    """Computes the digest of one tensor that arrives in parts."""

    def add(self, parts: Sequence[Any]) -> None:
        """Adds tensors of one device, as if concatenated along dim 0. May keep references until `flush`."""
        ...

    def flush(self) -> None:
        """Reads the added tensors and releases them. On a GPU this only enqueues work and does not wait."""
        ...

    def finish(self) -> str:
        """Returns the hex digest."""
        ...


class Digest(Protocol):
    """The digest function that an engine applies to its tensors, on their device."""

    def __call__(self, parts: Any) -> str:
        """Returns the hex digest of a tensor, or of several tensors as if concatenated along dim 0."""
        ...

    def begin(self) -> Hasher:
        """Starts the digest of one tensor that arrives in parts."""
        ...

    def finish(self, hashers: Sequence[Hasher]) -> list[str]:
        """Returns the hex digests of several hashers at once, which is faster on a GPU."""
        ...


@dataclass(frozen=True, slots=True)
class RankChecksums:
    """The tensors of one engine rank, after fusing and sharding."""

    rank: EngineRank
    layout: EngineLayout
    """The engine reports only `tp_size`, `pp_size` and `dp_size`."""
    checksums: Mapping[str, str]
    """Name of a tensor in the engine -> digest."""


class EngineControl(Protocol):
    """Control plane of one inference server.

    Every method raises `EngineError` if the server refuses, and `DeadlineExceeded` if it does not respond.
    """

    @property
    def url(self) -> str: ...

    @property
    def layout(self) -> EngineLayout:
        """How the engine's ranks divide the model."""
        ...

    def pause(self, mode: str = "abort") -> None:
        """Pauses the engine. `abort` ends running requests; `retract` and `in_place` keep them."""
        ...

    def resume(self) -> None: ...

    def flush_cache(self) -> None:
        """Empties the prefix cache and confirms that it is empty."""
        ...

    def speak_for(self, sender: str) -> None:
        """Makes `sender` the owner of the next weight updates. An agent calls it before it forwards a run's call."""
        ...

    def begin_update(self) -> None:
        """Opens a session of weight updates, in which the engine takes tensors. Ends a session that a dead sender left
        open. The engine is paused."""
        ...

    def end_update(self) -> None:
        """Closes the session: the engine makes its weights ready for requests. Call it after the digests."""
        ...

    def update_weights_from_tensor(
        self, payloads: Sequence[str], *, load_format: str | None, flush_cache: bool, weight_version: WeightVersion
    ) -> None:
        """Loads `payloads`: one serialised bucket per rank, in the order of `EngineLayout.ranks`."""
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
        """Loads broadcasts: one per tensor, or a single one of all tensors if `load_format` is "flattened_bucket"."""
        ...

    def update_weights_from_disk(
        self, *, model_path: str, flush_cache: bool, weight_version: WeightVersion
    ) -> None: ...

    def weight_checksums(self) -> list[RankChecksums]:
        """Digests of all tensors, with at least one entry per engine rank."""
        ...

    def release_memory(self, tags: Sequence[str] | None = None) -> None: ...

    def resume_memory(self, tags: Sequence[str] | None = None) -> None: ...
