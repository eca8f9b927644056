"""Weights agents for tests: in a thread, or as a process that ends itself at a chosen moment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slime.core.engine_interface import EngineControl, RankChecksums
from slime.core.topology import ONE_RANK, EngineLayout
from slime.models.common.table import FamilyTable
from slime.serving.payloads import digest
from slime.serving.weights_agent import WeightsAgent
from slime.weights.transports import Channel
from slime.weights.transports.disk import DiskTransport
from tests.support.weights import disk_settings, engine_tensors, transport_context

KILLED = """
import os, signal, sys, threading
from pathlib import Path
from slime.core.topology import EngineLayout
from slime.serving.control import HttpEngineControl
from slime.serving.weights_agent import WeightsAgent

folder, url, local, what, at = sys.argv[1:]
seen = 0

def note(doing):
    global seen
    seen += doing.startswith(what)
    if seen == int(at):
        os.kill(os.getpid(), signal.SIGKILL)

agent = WeightsAgent(Path(folder), url, HttpEngineControl(url, EngineLayout(), 60), Path(local), on_note=note)
agent.run(threading.Event())
"""


@contextlib.contextmanager
def agent_beside(control: EngineControl, folder: Path, local: Path, **more: Any) -> Iterator[WeightsAgent]:
    """An agent that answers in a thread, for the block."""
    agent = WeightsAgent(folder, control.url, control, local, **more)
    over = threading.Event()
    thread = threading.Thread(target=agent.run, args=(over,), daemon=True)
    thread.start()
    try:
        yield agent
    finally:
        over.set()
        thread.join(30)


def agent_that_dies(url: str, folder: Path, local: Path, *, what: str, at: int) -> subprocess.Popen[bytes]:
    """An agent as a process, which kills itself before it does what begins with `what` for the `at`-th time."""
    return subprocess.Popen([sys.executable, "-c", KILLED, str(folder), url, str(local), what, str(at)], env=os.environ)


def delta_channel(folder: Path, local: Path, *, table: FamilyTable, hf_checkpoint: Path, **more: Any) -> Channel:
    """The sender's end; `more`: fields of the transport, or of its context (`timeout_s`, `post_write`, `peers`)."""
    context = {name: more.pop(name) for name in ("timeout_s", "post_write", "peers") if name in more}
    chosen = {"update_weight_mode": "delta", "update_weight_local_checkpoint_dir": str(local), **more}
    transport = DiskTransport(**vars(disk_settings(folder, **chosen)))
    return transport.open(transport_context(table=table, hf_checkpoint=hf_checkpoint, **context))


class FileEngine:
    """An engine that keeps what it loaded from a folder, and can only be asked what an agent or a trainer asks."""

    def __init__(self, url: str, table: FamilyTable, layout: EngineLayout = ONE_RANK) -> None:
        self.url, self.layout, self.table = url, layout, table
        self.log: list[str] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self.version = 0

    def pause(self, mode: str = "abort") -> None:
        self.log.append("pause")

    def resume(self) -> None:
        self.log.append(f"resume {self.version}")

    def flush_cache(self) -> None:
        self.log.append("flush")

    def speak_for(self, sender: str) -> None:
        self.sender = sender

    def begin_update(self) -> None:
        self.log.append("begin")

    def end_update(self) -> None:
        self.log.append("end")

    def update_weights_from_disk(self, *, model_path: str, flush_cache: bool, weight_version: int) -> None:
        self.loaded = {
            name: tensor.clone()
            for file in Path(model_path).glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        self.version = weight_version
        self.log.append(f"load {weight_version}")

    def weight_checksums(self) -> list[RankChecksums]:
        return [
            RankChecksums(
                rank,
                self.layout,
                {
                    name: digest(tensor)
                    for name, tensor in engine_tensors(
                        self.table, self.loaded, layout=self.layout, rank=rank, on_cpu=True
                    )
                },
            )
            for rank in self.layout.ranks()
        ]
