"""`EngineControl` through the shared folder, for engines that a trainer reaches in no other way.

Each method is a call to the agent beside the engine, which repeats it on the spot. Weights travel as versions, so the
other ways of sending them do not exist here. Consumes calls, produces the agent's answers; a call waits in its caller's
thread, with a limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.core.errors import EngineError
from slime.core.ports import RankChecksums, WeightVersion
from slime.core.topology import EngineLayout, EngineRank
from slime.weights.delta.mailbox import call, mailbox


class FolderEngineControl:
    """Control plane of the engine that the trainer knows as `url`. See `core.ports.EngineControl`."""

    def __init__(self, folder: Path, url: str, layout: EngineLayout, timeout_s: float) -> None:
        """`folder`: the shared one; `timeout_s` limits each call."""
        self._box, self._url, self._layout, self._timeout_s = mailbox(folder, url), url.rstrip("/"), layout, timeout_s

    @property
    def url(self) -> str:
        return self._url

    @property
    def layout(self) -> EngineLayout:
        return self._layout

    def close(self) -> None:
        """Nothing is open."""

    def pause(self, mode: str = "abort") -> None:
        self._call("pause", mode=mode)

    def resume(self) -> None:
        self._call("resume")

    def flush_cache(self) -> None:
        self._call("flush_cache")

    def weight_checksums(self) -> list[RankChecksums]:
        found = self._call("weight_checksums")
        try:
            return [_checksums(rank) for rank in found]
        except (KeyError, TypeError) as error:
            raise EngineError(f"got no checksum report from the agent of {self._url}: {error!r}") from error

    def update_weights_from_tensor(
        self, payloads: Sequence[str], *, load_format: str | None, flush_cache: bool, weight_version: WeightVersion
    ) -> None:
        raise self._only_folder()

    def init_weights_update_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        raise self._only_folder()

    def destroy_weights_update_group(self, *, group_name: str) -> None:
        raise self._only_folder()

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
        raise self._only_folder()

    def update_weights_from_disk(self, *, model_path: str, flush_cache: bool, weight_version: WeightVersion) -> None:
        raise self._only_folder()

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        raise self._only_folder()

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        raise self._only_folder()

    def _call(self, method: str, **arguments: Any) -> Any:
        return call(self._box, method, arguments, limit_s=self._timeout_s)

    def _only_folder(self) -> EngineError:
        return EngineError(f"got engine {self._url}, which is reached through {self._box} alone; send it versions")


def _checksums(report: Mapping[str, Any]) -> RankChecksums:
    layout = report["layout"]
    sizes = {**layout, "stage_layers": tuple(layout["stage_layers"])}
    return RankChecksums(EngineRank(**report["rank"]), EngineLayout(**sizes), dict(report["checksums"]))
