"""The disk transport: writes each version as a complete HF checkpoint to a shared folder (`<disk_dir>/weight_v000012`).

Each bucket becomes a safetensors file in a temporary folder, written by the rank that sends the bucket. The conductor
writes the index and renames the folder, so readers never see a partial version. The folder is deleted once all engines
have loaded it, unless `--update-weight-disk-keep-files` is set.

With `--update-weight-local-checkpoint-dir`, engines load from a folder on their own host, where an agent maintains the
newest version. A version can then be a delta against the previous one (`slime.weights.delta`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.files import full_disk_named, open_to_readers
from slime.settings.fields import Need, derived, opt
from slime.settings.flags import COUNT
from slime.weights.delta.folder import add_assets, folder_of, missing, write_index, written_as
from slime.weights.receivers import Receiver, on_all
from slime.weights.transports.base import TRANSPORTS, Channel, Transport, TransportContext

if TYPE_CHECKING:
    from slime.settings import Args
    from slime.weights.send_plan import Bucket

_DELTA = Need(lambda s: s.update_weight_mode == "delta", "--update-weight-mode delta")


def _below_run_dir(settings: Any) -> str:
    return str(Path(settings.run_dir) / "weights")


@TRANSPORTS.register("disk")
@dataclass(frozen=True, kw_only=True)
class DiskTransport(Transport):
    """A shared folder. Supports any placement."""

    update_weight_disk_dir: str | None = derived(_below_run_dir, "below run_dir")
    """Folder of the disk transport. Default: <run_dir>/weights."""
    update_weight_disk_keep_files: bool = False
    """Keep the folder of each weight version after the engines have loaded it."""
    update_weight_mode: str = "full"
    update_weight_local_checkpoint_dir: str | None = None
    """Folder on each engine's host for the checkpoint that the engine loads. An agent on that host copies each version
    there, so engines never read the shared folder."""
    update_weight_delta_encoding: str = opt("xor", choices=("xor", "overwrite"), needs=_DELTA)
    """xor: old XOR new of each changed element, which compresses well; overwrite: the new elements."""
    update_weight_delta_checksum: str = opt("xxh3-128", choices=("xxh3-128", "blake3", "adler32"), needs=_DELTA)
    """Checksum of each patch and each patched tensor. blake3 requires the blake3 package."""
    update_weight_full_interval: int = opt(20, needs=_DELTA, within=COUNT)
    """Send a full version at least every N weight syncs; older versions are then removed."""

    def check(self, args: Args) -> str | None:
        if self.update_weight_mode != "delta":
            return None
        if self.update_weight_local_checkpoint_dir is None and not args.debug_train_only:
            return (
                "--update-weight-mode delta requires --update-weight-local-checkpoint-dir, because deltas are applied "
                "to a checkpoint on each engine's host; set it to a folder on a fast local disk"
            )
        return missing(self.update_weight_delta_checksum)

    def open(self, context: TransportContext) -> Channel:
        assert self.update_weight_disk_dir is not None, "the default is derived from run_dir"
        disk_dir = Path(self.update_weight_disk_dir)
        if self.update_weight_local_checkpoint_dir is not None:
            from slime.weights.delta.channel import DeltaChannel

            return DeltaChannel(
                disk_dir,
                context,
                every=self.update_weight_full_interval if self.update_weight_mode == "delta" else 1,
                encoding=self.update_weight_delta_encoding,
                checksum=self.update_weight_delta_checksum,
                keep=self.update_weight_disk_keep_files,
            )
        return DiskChannel(
            disk_dir,
            context.hf_checkpoint,
            keep=self.update_weight_disk_keep_files,
            rank=context.peers.rank,
            post_write=context.post_write,
        )


Files = dict[str, list[tuple[str, int]]]
"""Maps each file to the (HF name, number of bytes) of its tensors."""


class DiskChannel(Channel):
    """Writes a checkpoint and has the engines load it."""

    def __init__(
        self,
        disk_dir: Path,
        assets_from: Path,
        *,
        keep: bool,
        rank: int,
        post_write: Callable[[Path, Sequence[str]], object] | None = None,
    ) -> None:
        """`assets_from`: the HF checkpoint with the model's config and tokenizer."""
        self._disk_dir, self._assets_from, self._keep, self._rank = disk_dir, assets_from, keep, rank
        self._post_write = post_write
        self._writing: Path | None = None
        self._files: Files = {}

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:
        self._writing = self._disk_dir / written_as(version)
        self._files = {}
        if self._rank != 0:  # the conductor creates the folder
            return
        shutil.rmtree(self._writing, ignore_errors=True)
        with full_disk_named(self._disk_dir):
            self._writing.mkdir(parents=True)
            add_assets(self._writing, self._assets_from, lambda asset, place: place.symlink_to(asset.resolve()))

    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Bucket:
        return bucket

    def deliver(self, prepared: Bucket, receivers: Sequence[Receiver], *, version: int) -> None:
        from safetensors.torch import save_file

        assert self._writing is not None, "deliver before begin"
        file_name = f"model-{self._rank:05d}-{len(self._files):05d}.safetensors"
        tensors = {name: tensor.cpu() for name, tensor in prepared.tensors}
        with full_disk_named(self._disk_dir):
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
        with full_disk_named(self._disk_dir):
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
