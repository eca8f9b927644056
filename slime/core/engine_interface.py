"""Engine interfaces shared by packages that must not import each other. Tests implement them with small fakes.

`EngineControl` is the control plane of one SGLang server. `serving/control.py` implements it over HTTP. `weights/` only
talks to engines through this interface.

Supported and installed versions of SGLang and megatron-core are here too. Each slime release is tested with the oldest
and the newest supported version (`WINDOW`). Versions in between should work. `slime upgrade-check` tests whether newer
ones do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Protocol

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from slime.core.topology import EngineLayout, EngineRank

WeightVersion = int
"""Counts weight syncs. A run's first sync is version 1; a resumed run continues counting."""

TOKEN_VERSIONS_KEY = "token_weight_version"
"""Key in a response's `meta_info` for the per-token weight versions, if the engine reports them."""

SENDER_HEADER = "x-slime-sender"
"""HTTP header that identifies the sender of a control call, usually by run id."""

SESSION_CONFLICT = 409
"""HTTP status of a control call rejected because of an open weight update (`slime.compat.sglang_update_sessions`)."""

STREAM = "slime_stream"
"""Part of the answer of an engine that joins a group and can receive many buckets in one call."""


def stream_format(key: str, num_tensors: Sequence[int] = ()) -> str:
    """Returns the `load_format` of a call that announces buckets with these numbers of tensors.

    Engines keep the list of tensors under `key` as long as the group exists. A call without numbers and tensors
    announces the same buckets again.
    """
    return ":".join([STREAM, key, *([",".join(map(str, num_tensors))] if num_tensors else ())])


OWN_REQUESTS = "slime-"
"""Prefix of request ids sent by the run itself. If a weight sync aborts such a request, the run's client resumes it."""
ASK_AGAIN = "this request was aborted because the engine's weights are being updated; send it again"
"""Response to other clients when a weight sync aborts their request."""
ROUTED_EXPERTS_MARK = "-experts-"
"""A request id with this marker and a number N requests the routed experts from token N on. The id carries it because
sglang-router 0.3.2 forwards ids but drops unknown fields."""


class Hasher(Protocol):
    """Incrementally computes the digest of a tensor that arrives in parts."""

    def add(self, parts: Sequence[Any]) -> None:
        """Adds tensors (all on one device) as if concatenated along dim 0. May keep references until `Digest.read`."""
        ...

    def finish(self) -> str:
        """Returns the hex digest."""
        ...


class Digest(Protocol):
    """The hash function that an engine applies to its tensors, on the tensors' device."""

    def __call__(self, parts: Any) -> str:
        """Returns the hex digest of a tensor, or of several tensors as if concatenated along dim 0."""
        ...

    def begin(self) -> Hasher:
        """Returns a hasher for a tensor that arrives in parts."""
        ...

    def read(self, hashers: Sequence[Hasher]) -> None:
        """Hashes the tensors that were added to these hashers and drops the references. On a GPU, this only enqueues
        one kernel for all of them."""
        ...

    def finish(self, hashers: Sequence[Hasher]) -> list[str]:
        """Returns the hex digests of several hashers. On a GPU, this is faster than finishing them one by one."""
        ...

    def recording(self, device: Any) -> AbstractContextManager[object]:
        """Lets CUDA graphs that are recorded in the block hash. Yields memory that must be kept as long as the graphs.

        Inside, `read` raises `ValueError` for parts that a graph cannot hash.
        """
        ...


@dataclass(frozen=True, slots=True)
class RankChecksums:
    """Digests of the tensors on one engine rank, after fusing and sharding."""

    rank: EngineRank
    layout: EngineLayout
    """Only `tp_size`, `pp_size` and `dp_size` are set, because the engine reports no others."""
    checksums: Mapping[str, str]
    """Engine tensor name -> digest."""


class EngineControl(Protocol):
    """Control plane of one inference server.

    Every method raises `EngineError` if the server rejects the call and `DeadlineExceeded` if it does not respond.
    """

    @property
    def url(self) -> str: ...

    @property
    def layout(self) -> EngineLayout:
        """How the model is sharded over the engine's ranks."""
        ...

    def pause(self, mode: str = "abort") -> None:
        """Pauses generation. `abort` aborts running requests; `retract` and `in_place` keep them."""
        ...

    def resume(self) -> None: ...

    def flush_cache(self) -> None:
        """Flushes the prefix cache and verifies that it is empty."""
        ...

    def speak_for(self, sender: str) -> None:
        """Sends later calls on behalf of `sender`. An agent calls this before it forwards a run's call."""
        ...

    def begin_update(self) -> None:
        """Opens a weight update session, in which the engine accepts tensors. Closes a session left open by a dead
        sender. The engine must be paused."""
        ...

    def end_update(self) -> None:
        """Closes the session, and the engine prepares its weights for serving. Call this after `weight_checksums`."""
        ...

    def update_weights_from_tensor(
        self, payloads: Sequence[str], *, load_format: str | None, flush_cache: bool, weight_version: WeightVersion
    ) -> None:
        """Loads one bucket. `payloads`: the serialised bucket for each rank, in the order of `EngineLayout.ranks`."""
        ...

    def init_weights_update_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> bool:
        """Joins a sender's process group. Returns whether the engine can receive many buckets in one call
        (`slime.compat.sglang_weight_stream`)."""
        ...

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
        """Receives one broadcast per tensor, or one for all tensors if `load_format` is "flattened_bucket", or one for
        each bucket if it is a `stream_format`."""
        ...

    def update_weights_from_disk(
        self, *, model_path: str, flush_cache: bool, weight_version: WeightVersion
    ) -> None: ...

    def weight_checksums(self) -> list[RankChecksums]:
        """Returns the digests of all tensors, with at least one entry per engine rank."""
        ...

    def release_memory(self, tags: Sequence[str] | None = None) -> None: ...

    def resume_memory(self, tags: Sequence[str] | None = None) -> None: ...


# --- Supported versions

WINDOW: Mapping[str, tuple[str, str]] = {
    "sglang": ("0.5.16", "0.5.23"),
    "megatron-core": ("0.16.1", "0.19.2"),
}
"""Package -> (oldest, newest) tested version."""


@cache
def installed(package: str) -> Version | None:
    """Returns the installed version of a package, or None if it is not installed."""
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def parsed(version: object) -> Version | None:
    """Parses a version. Returns None if it is invalid."""
    try:
        return Version(str(version))
    except InvalidVersion:
        return None


def matches(version: Version | None, versions: str) -> bool:
    """Returns whether `version` satisfies the specifier `versions` (">=0.5.17,<0.6"). An empty one allows any version.

    A pre-release counts as the release it precedes, because it has the same interface. None never matches.
    """
    return version is not None and SpecifierSet(versions).contains(Version(version.base_version), prereleases=True)


def is_installed(package: str, versions: str) -> bool:
    """Returns whether the installed version of `package` satisfies `versions`. False if it is not installed."""
    return matches(installed(package), versions)


BEFORE_SESSIONS, WITH_SESSIONS = "<0.5.23", ">=0.5.23"
"""SGLang versions without and with weight update sessions (`/begin_weight_update`). Many interfaces changed between the
two ends of the window. Which release changed which interface has not been investigated."""
