"""Laws: a launch script in the public form, and the files of `slime cluster init ray`, run as they are, as jobs of a
Ray cluster that `ray start` started."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recipes.tiny.tasks import DIGITS_FILE, SFT_FILE, write_all
from slime.cli.main import main
from slime.observability.sinks import AXES, read_jsonl
from slime.settings.groups.cluster import has_gpu
from tests.support.e2e import ROOT, environment, latest_step, sums_task
from tests.support.training import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(has_gpu(), reason="the script of a user does not name a device, and this is for a CPU"),
]
START_LIMIT_S, JOB_LIMIT_S = 300.0, 900.0
REWARD = """
async def digits(args, sample, **kwargs):
    return sum(c.isdigit() for c in sample.response) / max(1, len(sample.response))
"""
SCRIPT = """
set -ex
export PYTHONUNBUFFERED=1
source models.sh

CKPT_ARGS=(
   --hf-checkpoint $PWD/tiny/
   --ref-load $PWD/tiny_torch_dist/
   --load $PWD/tiny_slime/
   --save $PWD/tiny_slime/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data $PWD/DIGITS
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --custom-rm-path my_reward.digits
   --num-rollout 1
   --rollout-batch-size 4
   --n-samples-per-prompt 2
   --rollout-max-response-len 16
   --rollout-temperature 1
   --global-batch-size 8
)
PERF_ARGS=(
   --tensor-model-parallel-size 1
   --sequence-parallel
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 2048
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
)
WANDB_ARGS=(
   # --use-wandb
   --wandb-key ${WANDB_KEY}
)
MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
)
RUNTIME_ENV_JSON="{
  \\"env_vars\\": {
    \\"PYTHONPATH\\": \\"/opt/Megatron-LM/:$PWD\\",
    \\"CUDA_DEVICE_MAX_CONNECTIONS\\": \\"1\\",
    \\"NCCL_NVLS_ENABLE\\": \\"0\\"
  }
}"
ray job submit --address="http://127.0.0.1:PORT" \\
   --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 TRAIN \\
   --actor-num-nodes 1 \\
   --actor-num-gpus-per-node 1 \\
   --rollout-num-gpus 1 \\
   ${MODEL_ARGS[@]} \\
   ${CKPT_ARGS[@]} \\
   ${ROLLOUT_ARGS[@]} \\
   ${GRPO_ARGS[@]} \\
   ${WANDB_ARGS[@]} \\
   ${PERF_ARGS[@]} \\
   ${MISC_ARGS[@]}
"""


TOKEN = secrets.token_hex(32)


def _environment(folder: Path) -> dict[str, str]:
    """That of the terminal in which the user calls `ray start` and the script; a token closes the cluster. Programs in
    `folder` come first."""
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {name: value for name, value in environment().items() if name not in ("RAY_ADDRESS", "WANDB_KEY")}
    kept |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    return {**kept, "PATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "240"}


@contextmanager
def _head(folder: Path) -> Iterator[int]:
    """`ray start --head` in a user's folder. The port of its job server."""
    port, files = free_port(), tempfile.mkdtemp(prefix="rj", dir="/tmp")
    words = ["ray", "start", "--head", "--port", str(free_port()), "--num-cpus", "6", "--num-gpus", "8", "--block"]
    words += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(port), "--temp-dir", files]
    with (folder / "ray.out").open("wb") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=_environment(folder), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until_s = time.monotonic() + START_LIMIT_S
        while "job submit" not in (folder / "ray.out").read_text() and time.monotonic() < until_s:
            assert process.poll() is None, (folder / "ray.out").read_text()
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()  # with --block, Ray's processes end with it
        try:
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            shutil.rmtree(files, ignore_errors=True)


def test_a_script_of_the_public_form_trains_as_a_job_of_ray(tmp_path: Path, tiny_qwen3: Path) -> None:
    pytest.importorskip("opencensus", reason="ray[default] has the job server")
    write_all(tmp_path)
    shutil.copytree(tiny_qwen3, tmp_path / "tiny")
    (tmp_path / "my_reward.py").write_text(REWARD)
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    sizes = f"--num-layers {config['num_hidden_layers']} --hidden-size {config['hidden_size']} --swiglu"
    sizes += f" --vocab-size {config['vocab_size']} --rotary-base 1 --normalization RMSNorm --disable-bias-linear"
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    (tmp_path / "models.sh").write_text(f"MODEL_ARGS=({sizes}\n   --rotary-base {int(theta)}\n)\n")
    with _head(tmp_path) as port:
        script = SCRIPT.replace("PORT", str(port)).replace("DIGITS", DIGITS_FILE)
        (tmp_path / "run.sh").write_text(script.replace("TRAIN", str(ROOT / "train.py")))
        done = subprocess.run(
            ["bash", "run.sh"],
            cwd=tmp_path,
            env=_environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=JOB_LIMIT_S,
        )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert "so the run reads" in said and "which a later --rotary-base" in said
    (run,) = (tmp_path / "runs").iterdir()
    assert any("train/loss" in row for row in read_jsonl(run / "metrics.jsonl"))
    assert (tmp_path / "tiny_slime" / "step_000000" / "manifest.json").is_file()


def test_a_job_that_is_stopped_saves_and_goes_on_when_it_is_submitted_again(tmp_path: Path, tiny_qwen3: Path) -> None:
    """Law: `ray job stop` lets the run end after its step, with a checkpoint, though Ray sends SIGTERM to every process
    of the job; the same job, submitted again, trains the other steps. Its PYTHONPATH is merged with that of the run."""
    pytest.importorskip("opencensus", reason="ray[default] has the job server")
    write_all(tmp_path)
    shutil.copytree(tiny_qwen3, tmp_path / "model")
    (tmp_path / "slime").write_text(
        f'#!/bin/bash\nexport PYTHONPATH="{ROOT}:$PYTHONPATH"\nexec {sys.executable} -m slime "$@"\n'
    )
    (tmp_path / "slime").chmod(0o755)
    jobs, run = tmp_path / "jobs", tmp_path / "runs" / "slime"
    metrics, endless = run / "metrics.jsonl", 1_000_000
    flags = [str(word) for word in sums_task(tmp_path / "model", tmp_path / SFT_FILE, num_steps=endless)]

    with _head(tmp_path) as port:
        address = f"http://127.0.0.1:{port}"
        words = ["--nodes", "1", "--gpus", "0", "--cpus", "1", "--shared", str(tmp_path), "--address", address]
        assert main(["cluster", "init", "ray", str(jobs), *words, *flags, "--max-restarts", "1"]) == 0

        def call(*words: str) -> str:
            done = subprocess.run(
                words, env=_environment(tmp_path), capture_output=True, text=True, timeout=JOB_LIMIT_S
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            return done.stdout

        def log() -> str:
            return call("ray", "job", "logs", "--address", address, "slime")

        def until(what: str, holds: Callable[[], bool]) -> None:
            until_s = time.monotonic() + JOB_LIMIT_S
            while not holds():
                assert time.monotonic() < until_s, f"no {what}: {log()[-4000:]}"
                time.sleep(0.5)

        call("bash", str(jobs / "submit.sh"))
        until("second step", lambda: metrics.is_file() and metrics.read_text().count("train/loss") >= 2)
        call("bash", str(jobs / "stop.sh"))
        said = log()
        assert "received SIGTERM: the run stops after this step" in said and "(exit status 75)" in said, said[-4000:]
        stopped_after = latest_step(run / "save")
        assert 1 <= stopped_after < endless - 1, said[-4000:]
        num_steps, train = stopped_after + 4, jobs / "train.sh"
        train.write_text(train.read_text().replace(str(endless), str(num_steps)))
        call("bash", str(jobs / "submit.sh"))
        until("end", lambda: "SUCCEEDED" in call("ray", "job", "list", "--address", address, "--log-style", "record"))
        assert f"resumed from step_{stopped_after:06d} in " in log()
    steps = [int(row[AXES["train"]]) for row in read_jsonl(metrics) if "train/loss" in row]
    assert steps == list(range(num_steps)), "each step once: nothing was lost, nothing was repeated"
