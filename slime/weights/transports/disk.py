"""Anywhere with a common filesystem: a whole HF checkpoint per version, `<disk_dir>/weight_v000012`, loaded by engines.

Buckets become safetensors files in a temporary directory, each written by the rank that sends it; the conductor writes
the index and renames the directory, so that a reader never sees half a version. Removed once all engines have loaded
it, unless kept.

With a folder of their hosts' own (`--update-weight-local-checkpoint-dir`) engines load from there, what an agent beside
each has brought; a version may then be what changed since the one before (`slime.weights.delta`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.files import open_to_readers
from slime.settings.fields import Need, derived, opt
from slime.settings.flags import COUNT
from slime.weights.delta.folder import add_assets, folder_of, write_index, written_as
from slime.weights.receivers import Receiver, on_all
from slime.weights.transports.base import TRANSPORTS, Channel, Transport, TransportContext

if TYPE_CHECKING:
    from slime.settings import Args
    from slime.weights.turns import Bucket

_DELTA = Need(lambda s: s.update_weight_mode == "delta", "--update-weight-mode delta")


def _below_run_dir(settings: Any) -> str:
    return str(Path(settings.run_dir) / "weights")


@TRANSPORTS.register("disk")
@dataclass(frozen=True, kw_only=True)
class DiskTransport(Transport):
    """A shared folder, on any placement."""

    update_weight_disk_dir: str | None = derived(_below_run_dir, "below run_dir")
    """Folder for the disk transport. Default: <run_dir>/weights."""
    update_weight_disk_keep_files: bool = False
    """Keep the folder of each weight version after the engines loaded it."""
    update_weight_mode: str = "full"
    update_weight_local_checkpoint_dir: str | None = None
    """Folder of each engine's host, not shared, for the checkpoint that engines load; an agent beside each engine
    brings versions there. With it no engine reads the shared folder."""
    update_weight_delta_encoding: str = opt("xor", choices=("xor", "overwrite"), needs=_DELTA)
    """xor: what changed elements changed by, which is small; overwrite: what they are now."""
    update_weight_delta_checksum: str = opt("xxh3-128", choices=("xxh3-128", "blake3", "adler32"), needs=_DELTA)
    """Of each patch, and of each tensor that it leads to. blake3 needs its package."""
    update_weight_full_interval: int = opt(20, needs=_DELTA, within=COUNT)
    """A version is full at least every so many weight syncs; older ones are then removed."""

    def check(self, args: Args) -> str | None:
        """Deltas are applied to a copy, and need their checksum."""
        from slime.weights.delta.folder import missing

        if self.update_weight_mode != "delta":
            return None
        if self.update_weight_local_checkpoint_dir is None and not args.debug_train_only:
            return (
                "got --update-weight-mode delta without --update-weight-local-checkpoint-dir: a delta is applied to a "
                "checkpoint that each engine's host keeps; name a folder there, on a fast local disk"
            )
        return missing(self.update_weight_delta_checksum)

    def open(self, context: TransportContext) -> Channel:
        assert self.update_weight_disk_dir is not None, "the folder is derived where none is given"
        if self.update_weight_local_checkpoint_dir is not None:
            from slime.weights.delta.channel import DeltaChannel

            return DeltaChannel(
                Path(self.update_weight_disk_dir),
                context,
                every=self.update_weight_full_interval if self.update_weight_mode == "delta" else 1,
                encoding=self.update_weight_delta_encoding,
                checksum=self.update_weight_delta_checksum,
                keep=self.update_weight_disk_keep_files,
            )
        return DiskChannel(
            Path(self.update_weight_disk_dir),
            context.hf_checkpoint,
            keep=self.update_weight_disk_keep_files,
            rank=context.peers.rank,
            post_write=context.post_write,
        )


Files = dict[str, list[tuple[str, int]]]
"""File -> (HF name, bytes) of its tensors."""


class DiskChannel(Channel):
    """Writes a checkpoint and has engines load it."""

    def __init__(
        self,
        disk_dir: Path,
        assets_from: Path,
        *,
        keep: bool,
        rank: int,
        post_write: Callable[[Path, Sequence[str]], object] | None = None,
    ) -> None:
        """`assets_from`: the HF checkpoint whose config and tokenizer belong to the weights."""
        self._disk_dir, self._assets_from, self._keep, self._rank = disk_dir, assets_from, keep, rank
        self._post_write = post_write
        self._writing: Path | None = None
        self._files: Files = {}

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:
        self._writing = self._disk_dir / written_as(version)
        self._files = {}
        if self._rank != 0:  # the conductor was here before
            return
        shutil.rmtree(self._writing, ignore_errors=True)
        self._writing.mkdir(parents=True)
        add_assets(self._writing, self._assets_from, lambda asset, place: place.symlink_to(asset.resolve()))

    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Bucket:
        return bucket

    def deliver(self, prepared: Bucket, receivers: Sequence[Receiver], *, version: int) -> None:
        from safetensors.torch import save_file

        assert self._writing is not None, "deliver before begin"
        file_name = f"model-{self._rank:05d}-{len(self._files):05d}.safetensors"
        tensors = {name: tensor.cpu() for name, tensor in prepared.tensors}
        save_file(tensors, self._writing / file_name, metadata={"format": "pt"})
        open_to_readers(self._writing / file_name)
        self._files[file_name] = [(name, tensor.nbytes) for name, tensor in tensors.items()]

    def report(self) -> Files:
        return self._files

    def finish(self, receivers: Sequence[Receiver], *, version: int, reports: Sequence[Files]) -> None:
        assert self._writing is not None, "finish before begin"
        files = [item for report in reports for item in report.items()]
        weight_map = {name: file for file, tensors in files for name, _ in tensors}
        total = sum(size for _, tensors in files for _, size in tensors)
        write_index(self._writing, weight_map, total)
        final = self._disk_dir / folder_of(version)
        shutil.rmtree(final, ignore_errors=True)
        self._writing.rename(final)
        self._writing = None
        try:
            if self._post_write is not None:
                self._post_write(final, [receiver.control.url for receiver in receivers])
            on_all(
                receivers,
                lambda c: c.update_weights_from_disk(model_path=str(final), flush_cache=False, weight_version=version),
                f"load {final}",
            )
        finally:
            if not self._keep:
                shutil.rmtree(final, ignore_errors=True)

    def settle(self) -> None:
        self._writing = None

    def abandon(self) -> None:
        if self._writing is not None:
            shutil.rmtree(self._writing, ignore_errors=True)
            self._writing = None

    def close(self) -> None:
        self.abandon()
