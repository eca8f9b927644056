"""Law: a launch script in the public form runs as it is, as a job of a Ray cluster that `ray start` started."""

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recipes.tiny.tasks import DIGITS_FILE, write_all
from slime.observability.sinks import read_jsonl
from slime.settings.groups.cluster import has_gpu
from tests.support.e2e import ROOT, environment
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


def _environment() -> dict[str, str]:
    """That of the terminal in which the user calls `ray start` and the script; a token closes the cluster."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
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
            words, cwd=folder, env=_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
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
            ["bash", "run.sh"], cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=JOB_LIMIT_S
        )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert "so the run reads" in said and "which a later --rotary-base" in said
    (run,) = (tmp_path / "runs").iterdir()
    assert any("train/loss" in row for row in read_jsonl(run / "metrics.jsonl"))
    assert (tmp_path / "tiny_slime" / "step_000000" / "manifest.json").is_file()
