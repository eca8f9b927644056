"""The disk transport with agents: writes versions (mostly deltas) to the shared folder and calls each engine's agent.

A version becomes visible when its temporary folder is renamed. The conductor then waits until the agent of each engine
has loaded it or the weight sync's timeout expires.

Any number of ranks can send. Each of them writes its tensors (`begin`, `deliver`) and reports them (`report`), and the
conductor combines all reports into a version (`finish`). All ranks agree on whether a version is full,
because they see the same engines and the same outcomes.

Invariants
1. A full version contains the trainer's tensors themselves. The first version after a start, after an engine joins, or
   after a failure is full.
2. A folder without a leading dot in its name is complete and flushed to disk.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.core.engine_interface import EngineControl
from slime.core.files import full_disk_named, sync_to_disk
from slime.weights.delta.folder import (
    Base,
    Manifest,
    Report,
    add_assets,
    folder_of,
    is_full,
    merged,
    prunable,
    sync_folder,
    tensor_checksums,
    whole_checksum,
    write_index,
    written_as,
)
from slime.weights.delta.mailbox import call, mailbox
from slime.weights.delta.writer import Memory, VersionWriter
from slime.weights.receivers import Receiver, on_all
from slime.weights.transports.base import Channel, TransportContext

if TYPE_CHECKING:
    from slime.weights.send_plan import Bucket

logger = logging.getLogger(__name__)


class DeltaChannel(Channel):
    def __init__(
        self, folder: Path, context: TransportContext, *, every: int, encoding: str, checksum: str, keep: bool
    ) -> None:
        """`every`: a full version is sent at least every `every` syncs. `keep`: whether to keep old versions."""
        self._folder, self._context, self._every, self._keep = folder, context, every, keep
        self._encoding, self._checksum = encoding, checksum
        self._memory: Memory | None = {} if every > 1 else None
        self._writer: VersionWriter | None = None
        self._since_full: int | None = None
        self._newest_full: int | None = None
        self._confirmed: tuple[Receiver, ...] | None = None
        """The engines that loaded the previous version; None after a failure."""
        self._failed_as_delta = False
        self._receivers: tuple[Receiver, ...] = ()
        self._full, self._version = True, 0
        self._base: Base | None = None
        self._tensors: dict[str, str] = {}
        self._made: Base | None = None
        self._costs: dict[str, float] = {}

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:
        self._receivers, self._version, self._failed_as_delta = tuple(receivers), version, False
        confirmed = self._confirmed
        self._full = is_full(
            since_full=self._since_full,
            every=self._every,
            confirmed=confirmed is not None,
            all_known=confirmed is not None and all(receiver in confirmed for receiver in receivers),
        )
        self._writer = VersionWriter(
            self._writing,
            self._memory,
            rank=self._context.peers.rank,
            full=self._full,
            encoding=self._encoding,
            checksum=self._checksum,
        )

    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Bucket:
        return bucket

    def deliver(self, prepared: Bucket, receivers: Sequence[Receiver], *, version: int) -> None:
        assert self._writer is not None, "deliver before begin"
        self._writer.add(prepared.tensors)

    def report(self) -> Report:
        assert self._writer is not None, "report before begin"
        return self._writer.report()

    def finish(self, receivers: Sequence[Receiver], *, version: int, reports: Sequence[Report]) -> None:
        whole = merged(reports)
        sums = tensor_checksums(whole.entries)
        self._tensors = sums if self._full else {**self._tensors, **sums}
        base = None if self._full else self._base
        manifest = Manifest(version, base, self._checksum, whole_checksum(self._tensors), whole.entries)
        with full_disk_named(self._folder):
            final = self._make_whole(manifest)
        self._made = target = Base(version, manifest.digest)
        self._costs = {
            "update_weights_density": whole.num_changed / max(1, whole.num_elements),
            "update_weights_wire_bytes": float(sum(file.stat().st_size for file in final.iterdir())),
            "update_weights_full": float(self._full),
        }
        if self._context.post_write is not None:
            self._context.post_write(final, [receiver.control.url for receiver in receivers])
        lost = {receiver.control.url: receiver.is_lost for receiver in receivers}

        def load(control: EngineControl) -> None:
            arguments = {"version": target.version, "digest": target.digest}
            box = mailbox(self._folder, control.url)
            call(box, "apply", arguments, limit_s=self._context.timeout_s, is_lost=lost[control.url])

        on_all(receivers, load, f"load {final}")

    def settle(self) -> None:
        if self._writer is None:  # this rank sent nothing
            return
        self._writer = None
        self._confirmed, self._base = self._receivers, self._made or self._base
        self._since_full = 0 if self._full or self._since_full is None else self._since_full + 1
        if self._full:
            self._newest_full = self._version
        if self._made is not None and not self._keep and self._newest_full is not None:
            names = [path.name for path in self._folder.iterdir()]
            for name in prunable(names, newest_full=self._newest_full):
                shutil.rmtree(self._folder / name, ignore_errors=True)
        self._made = None

    def abandon(self) -> None:
        self._failed_as_delta = self._writer is not None and not self._full
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            if self._context.peers.conducts:
                shutil.rmtree(self._writing, ignore_errors=True)
        self._confirmed, self._made = None, None

    @property
    def heals(self) -> bool:
        return self._failed_as_delta

    def costs(self) -> Mapping[str, float]:
        return self._costs

    def close(self) -> None:
        self.abandon()

    @property
    def _writing(self) -> Path:
        return self._folder / written_as(self._version)

    def _make_whole(self, manifest: Manifest) -> Path:
        """Adds the remaining files that readers need, then renames the folder to the version's final name."""
        folder = self._writing
        wanted = {entry.file for entry in manifest.entries}
        for file in folder.iterdir():
            if file.name not in wanted:
                file.unlink()
        if manifest.base is None:
            # Copies instead of symlinks, because readers of the folder may not have access to the checkpoint.
            add_assets(folder, self._context.hf_checkpoint, shutil.copyfile)
            weight_map = {entry.name: entry.file for entry in manifest.entries}
            write_index(folder, weight_map, sum(entry.num_bytes for entry in manifest.entries))
        manifest.write(folder)
        sync_folder(folder)
        final = self._folder / folder_of(manifest.version)
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
        sync_to_disk(self._folder)
        return final
