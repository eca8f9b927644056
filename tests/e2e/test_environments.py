"""Environments of other projects, as docs/environments.md describes them: two steps with the demo's model on each.

The files of an environment are the code blocks of the page, so the page is what runs.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.demo.model import unpack
from slime.agent.environments import INFO, EnvironmentSpec, installed
from slime.core.errors import ConfigError
from slime.core.sample import Sample
from slime.observability.sinks import read_jsonl
from slime.rollout.recordings import load_rollout
from slime.serving.child_process import all_processes
from tests.support.e2e import ROOT, environment

pytestmark = pytest.mark.slow

LIMIT_S = 600.0
"""Of one command; creating a virtual environment takes most of it."""
PACKAGES = {"nemo_gym": ("reasoning-gym==0.1.25",)}
TRAIN = """
    --colocate --device cpu --no-bf16 --input-key prompt --metadata-key metadata
    --custom-generate-function-path slime.agent.environments:generate
    --num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 4 --rollout-max-response-len 16
    --lr 1e-5 --lr-decay-style constant
"""


@pytest.fixture(scope="module")
def demo_model() -> Path:
    return unpack(ROOT / "assets" / "smollm2-135m-instruct")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page, and rows for NeMo-Gym in the format that the page shows."""
    folder = tmp_path_factory.mktemp("environments")
    page = (ROOT / "docs" / "environments.md").read_text()
    for name, body in re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", page, re.M | re.S):
        (folder / name).write_text(body)
    (row,) = re.findall(r"^```json\n(.*?)^```$", page, re.M | re.S)
    rows = [row.strip().replace("3 + 4", f"{a} + {b}").replace('"7"', f'"{a + b}"') for a in range(3) for b in range(9)]
    (folder / "nemo_gym.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def run(words: list[str]) -> str:
    """Runs slime; returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", "slime", *words],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def require_packages(kind: str) -> None:
    """Skips the test if the environment is not installed and cannot be."""
    try:
        if installed(EnvironmentSpec(kind, packages=PACKAGES.get(kind, ()))) is not None:
            return
    except ConfigError as missing:
        pytest.skip(str(missing))
    try:
        socket.create_connection(("pypi.org", 443), timeout=10).close()
    except OSError as error:
        pytest.skip(f"PyPI cannot be reached ({error}), and {kind} is not installed yet")


def expected(kind: str, sample: Sample) -> float | None:
    """Returns the reward as the rules of the page give it, computed here; None if they depend on the turns."""
    task: Any = sample.metadata["task"]
    if kind == "verifiers":
        return float(task["answer"] in sample.response)
    return sum(sample.metadata[INFO]["rewards"]) if kind == "openenv" else None


@pytest.mark.parametrize("kind", ["verifiers", "openenv", "nemo_gym", "textarena", "reasoning_gym"])
def test_two_steps(kind: str, files: Path, demo_model: Path, tmp_path: Path) -> None:
    """Law: every sample of both steps has the environment's score and trained tokens, and nothing is left running."""
    require_packages(kind)
    data = tmp_path / "tasks.jsonl"
    words = ["--environment-config", str(files / f"{kind}.yaml"), "--environment-path", str(files)]
    words += [word for package in PACKAGES.get(kind, ()) for word in ("--environment-package", package)]
    run(["env", "tasks", kind, *words, "--count", "24", "--to", str(data)])
    rollouts = str(tmp_path / "{rollout_id}.jsonl.zst")
    own = ["--hf-checkpoint", str(demo_model), "--prompt-data", str(data), "--run-dir", str(tmp_path / "run")]
    run(["train", *TRAIN.split(), *own, "--save-debug-rollout-data", rollouts])
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert sum("train/loss" in row for row in rows) == 2
    for step in range(2):
        samples = [one for group in load_rollout(Path(rollouts.format(rollout_id=step)))[1] for one in group]
        assert len({(one.group_index, one.index) for one in samples}) == 8
        for one in samples:
            assert isinstance(one.reward, float) and any(one.loss_mask or ()) and INFO in one.metadata
            if (wanted := expected(kind, one)) is not None:
                assert one.reward == wanted, (one.response, one.metadata)
    runner = b"environment_runner.py"
    left = [pid for pid in all_processes() if runner in _command(pid) and str(files).encode() in _environ(pid)]
    assert left == []


def _command(pid: int) -> bytes:
    return _read(pid, "cmdline")


def _environ(pid: int) -> bytes:
    return _read(pid, "environ")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def test_one_episode_is_shown(files: Path, demo_model: Path) -> None:
    """Law: `slime env try` prints the conversation, its tokens and the reward."""
    require_packages("reasoning_gym")
    words = ["--environment-config", str(files / "reasoning_gym.yaml"), "--hf-checkpoint", str(demo_model)]
    said = run(["env", "try", "reasoning_gym", *words, "--device", "cpu", "--rollout-max-response-len", "16"])
    assert re.search(r"^--- user, \d+ tokens$", said, re.M) and re.search(r"^--- sampled, \d+ tokens$", said, re.M)
    assert re.search(r": reward [01]\.\d+, 1 turns, \d+ tokens, \d+ sampled$", said, re.M)
    assert json.loads(said.rpartition("environment: ")[2])["answer"]
