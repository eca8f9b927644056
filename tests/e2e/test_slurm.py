"""Law: the files of `slime cluster init slurm` run under Slurm as they are written, over two nodes, and a job that is
told that its time is over goes on by itself from its checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.tiny.tasks import SFT_FILE
from slime.cli.main import main
from slime.observability.sinks import AXES, read_jsonl
from tests.support.e2e import latest_step, sums_task
from tests.support.slurm import slurm_cluster, why_no_slurm

NO_SLURM = why_no_slurm()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM or "there is Slurm")]
JOB_LIMIT_S = 600.0
ENDLESS = 1_000_000
"""Steps of the first launch. Once it is stopped, train.sh gets a number that the second one reaches."""


def until(what: str, holds: Callable[[], bool], tail: Callable[[], str]) -> None:
    until_s = time.monotonic() + JOB_LIMIT_S
    while not holds():
        assert time.monotonic() < until_s, f"no {what}: {tail()}"
        time.sleep(0.5)


def test_a_job_requeues_itself_and_goes_on(tmp_path: Path, tiny_qwen3: Path, tasks: Path) -> None:
    """The batch script gets the signal that Slurm sends before the time limit."""
    shutil.copytree(tiny_qwen3, tmp_path / "model")
    shutil.copytree(tasks, tmp_path / "tasks")
    words = map(str, sums_task(tmp_path / "model", tmp_path / "tasks" / SFT_FILE, num_steps=ENDLESS))
    sizes = ["--nodes", "2", "--gpus", "0", "--cpus", "1", "--time", "00:20:00", "--warn-s", "120"]
    jobs = tmp_path / "jobs"
    assert main(["cluster", "init", "slurm", str(jobs), *sizes, "--shared", str(tmp_path), *words]) == 0
    save = tmp_path / "runs" / "slime" / "save"
    with slurm_cluster(tmp_path, 2) as slurm:
        number = slurm.run("sbatch", "--parsable", str(jobs / "job.sbatch")).strip()

        def output() -> str:
            file = jobs / f"job_{number}.log"
            return file.read_text() if file.is_file() else ""

        def tail() -> str:
            return f"{slurm.job(number)}\n{output()[-4000:]}\n{slurm.logs}"

        record = tmp_path / "runs" / "slime" / "metrics.jsonl"

        def trains() -> bool:
            assert slurm.job(number)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), tail()
            return record.is_file() and "train/loss" in record.read_text()

        until("step", trains, tail)
        slurm.run("scancel", "--batch", "--signal=USR1", number)
        until("requeue", lambda: "the run is not complete: requeueing job" in output(), tail)
        stopped_after = latest_step(save)
        num_steps, train = stopped_after + 4, jobs / "train.sh"
        train.write_text(train.read_text().replace(str(ENDLESS), str(num_steps)))
        assert stopped_after >= 0, tail()
        until("end", lambda: slurm.job(number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), tail)
        job = slurm.job(number)
        assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), tail()
        said = output()
    assert "received SIGUSR1: the run stops after this step" in said
    assert f"resumed from step_{stopped_after:06d} in " in said and "launch 2 of job" in said
    steps = [int(row[AXES["train"]]) for row in read_jsonl(record) if "train/loss" in row]
    assert steps == list(range(num_steps)), "each step once: nothing was lost, nothing was repeated"
