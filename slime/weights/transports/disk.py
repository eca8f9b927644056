"""Anywhere with a common filesystem: a whole HF checkpoint per version, `<disk_dir>/weight_v000012`, loaded by engines.

Buckets become safetensors files in a temporary directory, renamed when complete, so that a reader never sees half a
version. Removed once all engines have loaded it, unless kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from slime.core.errors import WeightSyncError
from slime.weights.buckets import Bucket, Tamper
from slime.weights.targets import EngineTarget, Peers, on_all

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
"""Files of the source checkpoint that are not linked: they hold the old weights."""


class DiskTransport:
    """Writes a checkpoint and has engines load it."""

    name = "disk"

    def __init__(
        self, disk_dir: Path, assets_from: Path, peers: Peers, *, keep: bool = False, tamper: Tamper | None = None
    ) -> None:
        """`assets_from`: the HF checkpoint whose config and tokenizer belong to the weights."""
        self._disk_dir, self._assets_from = Path(disk_dir), Path(assets_from)
        self._peers, self._keep, self._tamper = peers, keep, tamper
        self._writing: Path | None = None
        self._index: dict[str, str] = {}
        self._num_files = 0
        self._num_bytes = 0

    def begin(self, targets: Sequence[EngineTarget], *, version: int) -> None:
        del targets
        self._writing = self._disk_dir / f".weight_v{version:06d}.tmp"
        self._index, self._num_files, self._num_bytes = {}, 0, 0
        shutil.rmtree(self._writing, ignore_errors=True)
        self._writing.mkdir(parents=True)
        for asset in self._assets_from.iterdir():
            if asset.is_file() and not asset.name.endswith(WEIGHT_SUFFIXES):
                (self._writing / asset.name).symlink_to(asset.resolve())
        if not (self._writing / "config.json").exists():
            raise WeightSyncError(f"got no config.json in {self._assets_from}; engines cannot load weights without it")

    def prepare(self, bucket: Bucket, targets: Sequence[EngineTarget]) -> Any:
        del targets
        return bucket if self._peers.is_sender else None

    def deliver(self, prepared: Any, targets: Sequence[EngineTarget], *, version: int) -> None:
        del targets, version
        assert self._writing is not None, "deliver before begin"
        self._num_files += 1
        self._num_bytes += prepared.num_bytes
        file_name = f"model-{self._num_files:05d}.safetensors"
        tensors = {name: t.cpu() for name, t in prepared.tampered(self._tamper).tensors}
        save_file(tensors, self._writing / file_name, metadata={"format": "pt"})
        self._index.update(dict.fromkeys(tensors, file_name))

    def finish(self, targets: Sequence[EngineTarget], *, version: int) -> None:
        assert self._writing is not None, "finish before begin"
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": self._index}
        (self._writing / "model.safetensors.index.json").write_text(json.dumps(index))
        final = self._disk_dir / f"weight_v{version:06d}"
        shutil.rmtree(final, ignore_errors=True)
        self._writing.rename(final)
        self._writing = None
        try:
            on_all(
                targets,
                lambda c: c.update_weights_from_disk(model_path=str(final), flush_cache=False, weight_version=version),
                f"load {final}",
            )
        finally:
            if not self._keep:
                shutil.rmtree(final, ignore_errors=True)

    def abandon(self) -> None:
        if self._writing is not None:
            shutil.rmtree(self._writing, ignore_errors=True)
            self._writing = None

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self.abandon()
