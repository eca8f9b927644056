"""A trainer of one rank, engines that are files, agents beside them, and the folder between them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch

from slime.serving.control import FolderEngineControl
from slime.serving.payloads import digest
from slime.weights.delta.channel import DeltaChannel
from slime.weights.delta.folder import Manifest, folder_of
from slime.weights.receivers import Receiver
from slime.weights.sync import sync_weights
from tests.support.weight_agents import FileEngine, agent_beside, delta_channel
from tests.support.weights import Whole, model

URL = "http://127.0.0.1:30000"


class Rig:
    """A trainer of one rank, engines with agents, and a folder between them."""

    def __init__(self, tmp_path: Path, stack: ExitStack, *urls: str, folder_only: bool = False, **more: Any) -> None:
        self.folder, self.stack = tmp_path / "shared", stack
        self.folder.mkdir()
        self.checkpoint = tmp_path / "checkpoint"
        self.checkpoint.mkdir()
        (self.checkpoint / "config.json").write_text("{}")
        (self.checkpoint / "model.safetensors").write_text("old weights")
        self.table, state = model()
        self.state = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
        self.locals = tmp_path / "local"
        self.folder_only = folder_only
        self.begin_again(**more)
        self.engines: list[FileEngine] = []
        self.agents: list[Any] = []
        self.receivers: list[Receiver] = []
        for url in urls or (URL,):
            self.join(url)

    def begin_again(self, **more: Any) -> None:
        """A trainer that starts, and knows nothing of what is in the folder."""
        self.channel = cast(
            DeltaChannel,
            delta_channel(self.folder, self.locals, table=self.table, hf_checkpoint=self.checkpoint, **more),
        )

    def join(self, url: str) -> FileEngine:
        engine = FileEngine(url, self.table)
        local = self.locals / url[-5:]
        self.agents.append(self.stack.enter_context(agent_beside(cast(Any, engine), self.folder, local)))
        self.engines.append(engine)
        control = FolderEngineControl(self.folder, url, engine.layout, 20) if self.folder_only else engine
        self.receivers.append(Receiver(cast(Any, control)))
        return engine

    def step(self, seed: int, density: float = 0.05) -> None:
        """A few elements of some tensors move."""
        generator = torch.Generator().manual_seed(seed)
        for number, (name, tensor) in enumerate(self.state.items()):
            if (number + seed) % 3:
                moved = torch.rand(tensor.shape, generator=generator) < density
                self.state[name] = torch.where(moved, tensor * 1.01, tensor)

    def sync(self, version: int) -> dict[str, float]:
        return sync_weights(
            Whole(self.table, self.state.items()),
            receivers=self.receivers,
            channel=self.channel,
            digest=digest,
            version=version,
            buffer_bytes=1024,
        )

    def assert_served(self, version: int) -> None:
        for engine in self.engines:
            assert engine.log[-1] == f"resume {version}"
            for name, tensor in self.state.items():
                assert torch.equal(engine.loaded[name].view(torch.int16), tensor.view(torch.int16)), name

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name != "agents")

    def manifest(self, version: int) -> Manifest:
        return Manifest.read(self.folder / folder_of(version))


def patch_file(folder: Path) -> Path:
    (file,) = folder.glob("delta-*.bin")
    return file


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at // 8)
        (byte,) = opened.read(1)
        opened.seek(at // 8)
        opened.write(bytes([byte ^ 1 << at % 8]))
