"""Saves in a loop and is killed.

One trainer is built; for each kill a fork of it saves step after step below FOLDER, synchronously or in the background
(in turn), and gets SIGKILL at a random moment of a save. Then whatever `latest` names has to be whole, of one moment,
not older than the last save that was complete, and loads.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch

from slime.training.backend import MegatronBackend
from slime.training.state import checkpoint
from slime.training.state.checkpoint import BackgroundSave
from tests.support.ranks import Seat
from tests.support.training import random_batch, training_args


def save_and_kill(seat: Seat, model: Path, folder: Path, num_kills: int) -> dict[str, dict[str, Any]]:
    """Runs everything, with `num_kills` kills of either kind, which it counts."""
    backend = MegatronBackend(training_args(model), **seat.place)
    backend.weight_version = 1
    backend.train(random_batch())
    draw = random.Random(0)
    counts: dict[str, Any] = {}
    for kind in ("sync", "async"):
        root = folder / kind
        usual_s = kill_one(backend, root, kind, delay_s=None)
        inside = []
        for i in range(num_kills):
            before = last_committed(root)
            delay_s = draw.uniform(0.0, 1.3 * usual_s)
            inside.append(kill_one(backend, root, kind, delay_s=delay_s, first=before + (i % 3 > 0)))
            check(backend, root, before)
        counts[kind] = {"kills": num_kills, "inside": sum(map(bool, inside)), "save_s": usual_s}
    backend.close()
    return counts


def kill_one(backend: Any, root: Path, kind: str, *, delay_s: float | None, first: int = 0) -> float:
    """Forks, and kills `delay_s` after the second save begins; whether that was before it was complete.

    Without a delay: lets three saves pass and returns how long one takes in seconds.
    """
    news, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            save_forever(backend, root, kind, first, told)
        finally:
            os._exit(1)
    os.close(told)
    times: dict[bytes, list[float]] = {b"b": [], b"c": []}
    with os.fdopen(news, "rb", buffering=0) as lines:
        enough = 4 if delay_s is None else 2
        while len(times[b"b"]) < enough:
            what = lines.read(1)
            assert what, f"the saving process ended by itself, see its output; heard {times}"
            times[what].append(time.monotonic())
        time.sleep(delay_s or 0.0)
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "it ended otherwise than by the signal"
        rest = lines.read()
    if delay_s is None:
        return max(c - b for b, c in zip(times[b"b"], times[b"c"], strict=False))
    return float(len(times[b"c"]) + rest.count(b"c") < len(times[b"b"]) + rest.count(b"b"))


def save_forever(backend: Any, root: Path, kind: str, first: int, told: int) -> None:
    """Steps and saves; tells "b" when a save begins and "c" when it is complete."""
    background = BackgroundSave()
    step = first

    def write(parts: Path, snapshot: Any, step: int) -> dict[str, float]:
        checkpoint.commit(parts, step, snapshot.write(parts))
        checkpoint.prune(root, keep_last=2, retain_interval=20)
        os.write(told, b"c")
        return {}

    while True:
        mark(backend, step)
        background.finish(limit_s=60)
        os.write(told, b"b")
        parts = checkpoint.begin(root, step)
        (parts / "data_buffer.json").write_text(json.dumps({"step": step}))
        snapshot = backend.snapshot(on_host=kind == "async")
        background.start(lambda p=parts, s=snapshot, n=step: write(p, s, n), what=f"step {step}")
        if kind == "sync":
            background.finish(limit_s=60)
        mark(backend, -1)  # training goes on
        step += 1


def mark(backend: Any, step: int) -> None:
    """Makes the state that of a step."""
    backend.weight_version = step
    with torch.no_grad():
        for parameter in backend.model.shards.values():
            parameter.fill_(float(step))


def last_committed(root: Path) -> int:
    """The step that `latest` names."""
    return int(json.loads((root / "latest.json").read_text())["rollout_id"])


def check(backend: Any, root: Path, before: int) -> None:
    """What `latest` names loads, bit for bit the state of its step."""
    found = checkpoint.find(root)
    assert found is not None and found.rollout_id >= before, f"{found} after step {before} was complete"
    assert json.loads((root / "latest.json").read_text())["path"] in found.path.name, (
        f"latest names another than {found}"
    )
    checkpoint.verify(found.path)
    assert json.loads((found.path / "data_buffer.json").read_text()) == {"step": found.rollout_id}
    mark(backend, -2)
    backend.load(found.path)
    assert backend.weight_version == found.rollout_id, f"version {backend.weight_version} in {found}"
    for name, parameter in backend.model.shards.items():
        assert (parameter == float(found.rollout_id)).all(), f"{name} is of another step than {found}"
