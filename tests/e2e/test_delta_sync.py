"""Runs whose weights travel as deltas: a damaged one is healed within its weight sync, and a folder alone is enough."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.serving.leased_ports import request
from tests.e2e.test_external_engines import KEY, KEYS, flags_of, servers
from tests.support.e2e import ROOT, Flags, RealRun, environment
from tests.support.ledger import require_balance

pytestmark = pytest.mark.slow

DAMAGE = """
from pathlib import Path


def damage(args, version_dir, rollout_engines):
    "Flips a bit of one delta, once."
    folder = Path(version_dir)
    done = folder.parent / "damaged"
    if folder.name == "weight_v000003" and not done.exists():
        done.touch()
        file = max(folder.glob("delta-*.bin"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
"""


def test_a_damaged_delta_is_followed_by_all_weights_in_the_same_weight_sync(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: the run goes on as if nothing had been, both stages send once more, agents end with it, and old versions are
    gone.
    """
    folder, hook = runs / "delta", runs / "damage.py"
    hook.write_text(DAMAGE)
    where = [
        "--update-weight-mode",
        "delta",
        "--update-weight-disk-dir",
        str(folder),
        "--update-weight-full-interval",
        "4",
    ]
    local = ["--update-weight-local-checkpoint-dir", str(runs / "delta-local")]
    more = ["--custom-update-weight-post-write-path", f"{hook}:damage", "--num-rollout", "6"]
    where += ["--update-weight-full-interval", "4"]
    stages = ["--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2"]
    rates = ["--lr", "1e-3", "--lr-decay-style", "constant"]
    with RealRun(runs / "delta-run", [*digits(tiny_qwen3), *rates, *stages, *where, *local, *more]) as run:
        assert run.wait() == 0, run.tail
        logs = [log.read_text() for log in (run.run_dir / "logs").glob("train*.log")]
        assert (folder / "damaged").exists() and any("retrying with the full weights" in log for log in logs)
        full = run.series("perf", "perf/update_weights_full")
        assert full == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0], "version 1 is before the first step; 2 to 7"
        assert sorted(path.name for path in folder.glob("weight_v*")) == ["weight_v000007"]
        require_balance(run.metrics("train"))
        assert run.left() == []


def test_a_run_updates_an_engine_through_the_folder_alone(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: pause, weights, digests and going on all pass through files, by an agent that somebody started by hand."""
    folder = runs / "delta-external"
    with servers(tiny_qwen3, folder, 1) as (server,):
        shared, local = folder / "shared", folder / "local"
        words = ["weights-agent", "--engine", server.url, "--disk-dir", str(shared), "--local-dir", str(local)]
        program = [sys.executable, "-m", "slime.cli.main", *words]
        agent = subprocess.Popen(program, cwd=ROOT, env={**environment(), **KEYS})
        try:
            where = ["--update-weight-mode", "delta", "--update-weight-disk-dir", str(shared)]
            more = ["--update-weight-local-checkpoint-dir", "not of this host", "--update-weight-folder-only"]
            address = server.url.removeprefix("http://")
            flags = flags_of(digits, tiny_qwen3, address, "--num-rollout", "3", *where, *more)
            with RealRun(runs / "delta-external-run", flags, more_env=KEYS) as run:
                assert run.wait() == 0, run.tail
                assert run.series("perf", "perf/update_weights_full") == [0.0, 0.0, 0.0]
                assert run.left() == []
        finally:
            agent.terminate()
            assert agent.wait(30) == 0
        assert server.answers()
        version = json.loads(request("GET", f"{server.url}/model_info", api_key=KEY)[1])["weight_version"]
        assert version == "4", "the weights after the third step are the fourth"
