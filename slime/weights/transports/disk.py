"""Anywhere with a common filesystem: a whole HF checkpoint per version, `<disk_dir>/weight_v000012`, loaded by engines.

Buckets become safetensors files in a temporary directory, each written by the rank that sends it; the conductor writes
the index and renames the directory, so that a reader never sees half a version. Removed once all engines have loaded
it, unless kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.errors import WeightSyncError
from slime.core.file_mode import open_to_readers
from slime.settings.fields import derived
from slime.weights.receivers import Receiver, on_all
from slime.weights.transports.base import TRANSPORTS, Channel, Transport, TransportContext

if TYPE_CHECKING:
    from slime.weights.buckets import Bucket

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
"""Files of the source checkpoint that are not linked: they hold the old weights."""


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

    def open(self, context: TransportContext) -> DiskChannel:
        assert self.update_weight_disk_dir is not None, "the folder is derived where none is given"
        return DiskChannel(
            Path(self.update_weight_disk_dir),
            context.hf_checkpoint,
            keep=self.update_weight_disk_keep_files,
            rank=context.peers.rank,
        )


Files = dict[str, list[tuple[str, int]]]
"""File -> (HF name, bytes) of its tensors."""


class DiskChannel(Channel):
    """Writes a checkpoint and has engines load it."""

    def __init__(self, disk_dir: Path, assets_from: Path, *, keep: bool, rank: int) -> None:
        """`assets_from`: the HF checkpoint whose config and tokenizer belong to the weights."""
        self._disk_dir, self._assets_from, self._keep, self._rank = disk_dir, assets_from, keep, rank
        self._writing: Path | None = None
        self._files: Files = {}

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:
        self._writing = self._disk_dir / f".weight_v{version:06d}.tmp"
        self._files = {}
        if self._rank != 0:  # the conductor was here before
            return
        shutil.rmtree(self._writing, ignore_errors=True)
        self._writing.mkdir(parents=True)
        for asset in self._assets_from.iterdir():
            if asset.is_file() and not asset.name.endswith(WEIGHT_SUFFIXES):
                (self._writing / asset.name).symlink_to(asset.resolve())
        if not (self._writing / "config.json").exists():
            raise WeightSyncError(f"got no config.json in {self._assets_from}; engines cannot load weights without it")

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
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self._writing / "model.safetensors.index.json").write_text(json.dumps(index))
        final = self._disk_dir / f"weight_v{version:06d}"
        shutil.rmtree(final, ignore_errors=True)
        self._writing.rename(final)
        self._writing = None
        try:
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
