"""The examples of agents as people start them: one command, one step on the real stack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime.observability.sinks import read_jsonl
from slime.rollout.recordings import load_rollout
from tests.support.e2e import ROOT, RUN_LIMIT_S, environment

pytestmark = pytest.mark.slow


EXAMPLES = [("agent_search", 1), ("agent_python_tool", 1), ("multi_agent", 5)]
EXAMPLES += [("chat_tools", 1), ("chat_search", 1), ("chat_judge", 1)]


@pytest.mark.parametrize(("name", "siblings"), EXAMPLES)
def test_the_one_command(name: str, siblings: int, tiny_qwen3: Path, tmp_path: Path) -> None:
    """Law: a random model's sessions are trained: every execution of the step, with all its siblings."""
    few = ["--num-rollout", "1", "--rollout-max-response-len", "16", "--device", "cpu"]
    few += ["--chat-template", "examples/tools.jinja", "--run-dir", str(tmp_path / "run")]
    rollouts = str(tmp_path / "{rollout_id}.jsonl.zst")
    command = [sys.executable, "-m", "examples.run", name, "--hf-checkpoint", str(tiny_qwen3), *few]
    done = subprocess.run(
        [*command, "--save-debug-rollout-data", rollouts],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert any("train/loss" in row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    groups = load_rollout(Path(rollouts.format(rollout_id=0)))[1]
    assert len(groups) == 4
    for group in groups:
        indices = [sample.index for sample in group]
        assert len(set(indices)) == 4 and all(indices.count(i) == siblings for i in indices)
        assert all(sample.reward is not None and any(sample.loss_mask or ()) for sample in group)
