"""Law: the files of `slime cluster init` hold the user's numbers, are what their programs read, and start a run whose
flags slime accepts. Under Slurm and Ray themselves they run in tests/e2e/test_slurm.py and test_ray_jobs.py."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from slime.cli.loops import CLUSTERS
from slime.cli.main import main
from slime.core.errors import AGAIN
from slime.settings import parse_args
from tests.support.command_line import complete
from tests.support.marks import quick

ROOT = Path(__file__).parents[3]
SCHEMA = yaml.safe_load((ROOT / "tests" / "support" / "kuberay_schema.yaml").read_text())
RUN_FLAGS = ("--rollout-batch-size", "16", "--eval-interval", "5", "--no-colocate")


def written(tmp_path: Path, kind: str, *words: str) -> Path:
    assert main(["cluster", "init", kind, str(tmp_path / kind), *words]) == 0
    return tmp_path / kind


def flags_of(script: str) -> list[str]:
    """The flags of the run in train.sh."""
    return shlex.split(script.replace("\\\n", " ").partition('slime train "$@"')[2])


def documents(file: Path) -> list[Any]:
    return list(yaml.safe_load_all(file.read_text()))


@pytest.mark.parametrize("kind", CLUSTERS)
def test_shell_can_read_the_scripts_and_slime_the_flags(kind: str, tmp_path: Path) -> None:
    folder = written(tmp_path, kind, "--nodes", "3", "--gpus", "4", "--shared", "/net")
    for script in (*folder.glob("*.sh"), *folder.glob("*.sbatch")):
        read = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
        assert (read.returncode, read.stderr) == (0, ""), script
        assert "{{" not in script.read_text() and max(map(len, script.read_text().splitlines())) <= 160
    flags = flags_of((folder / "train.sh").read_text())
    base = complete(tmp_path)
    own = dict(zip(base[:-1:2], base[1::2], strict=True))
    there = {
        f"/net/{name}": own[flag] for name, flag in (("model", "--hf-checkpoint"), ("prompts.jsonl", "--prompt-data"))
    }
    args = parse_args([*(there.get(word, word) for word in flags), "--ray-address", "10.0.0.1:6379"])
    assert (args.actor_num_nodes, args.actor_num_gpus_per_node, args.colocate, args.device) == (3, 4, True, "cuda")
    assert args.save == "/net/runs/slime/save" and args.exit_signal_handler, "a requeued job continues"
    assert args.load is None and "--load is --save" in args.origins["load"]


def test_flags_of_the_run_replace_the_examples(tmp_path: Path) -> None:
    folder = written(tmp_path, "ray", *RUN_FLAGS)
    flags = flags_of((folder / "train.sh").read_text())
    assert flags[-len(RUN_FLAGS) :] == list(RUN_FLAGS) and "--colocate" not in flags
    assert "--hf-checkpoint" not in flags and "--save" in flags, "who gives flags gives the model, too"


@pytest.mark.parametrize(
    ("gpus", "limits"), quick([("4", {"nvidia.com/gpu": "4"}), ("0", {})], ("4", {"nvidia.com/gpu": "4"}))
)
def test_kuberay_can_read_its_files_with_the_numbers_in_them(tmp_path: Path, gpus: str, limits: dict[str, str]) -> None:
    """Law: each document has only fields that exist, with values of their types, and all names refer to something."""
    numbers = ["--name", "big-run", "--nodes", "16", "--gpus", gpus, "--cpus", "48", "--memory", "900Gi"]
    numbers += ["--image", "registry:5000/slime:1", "--claim", "lustre", "--shared", "/lustre"]
    folder = written(tmp_path, "k8s", *numbers)
    for name, kind in (("raycluster.yaml", "RayCluster"), ("rayjob.yaml", "RayJob")):
        config, resource = documents(folder / name)
        for document in (config, resource):
            jsonschema.validate(document, SCHEMA)
        assert resource["kind"] == kind and resource["metadata"]["name"] == "big-run"
        assert config["data"]["train.sh"].rstrip() == (folder / "train.sh").read_text().rstrip()
        spec = resource["spec"] if kind == "RayCluster" else resource["spec"]["rayClusterSpec"]
        (group,) = spec["workerGroupSpecs"]
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 16
        assert group["rayStartParams"] == {"num-cpus": "48", "num-gpus": gpus}
        assert spec["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
        for pod in (spec["headGroupSpec"]["template"]["spec"], group["template"]["spec"]):
            (container,) = pod["containers"]
            assert container["image"] == "registry:5000/slime:1"
            assert {mount["name"] for mount in container["volumeMounts"]} == {
                volume["name"] for volume in pod["volumes"]
            }
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            assert volumes["job"]["configMap"]["name"] == config["metadata"]["name"]
            assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == "lustre"
        assert group["template"]["spec"]["containers"][0]["resources"]["limits"] == {"memory": "900Gi", **limits}


@pytest.mark.slow
def test_the_schema_finds_mistakes(tmp_path: Path) -> None:
    """The check above would hold for a schema that accepts everything."""
    _, good = documents(written(tmp_path, "k8s") / "rayjob.yaml")
    spec = good["spec"]["rayClusterSpec"]
    broken: list[Callable[[], Any]] = [
        lambda: spec.update(workerGroupSpec=[]),
        lambda: spec["workerGroupSpecs"][0].update(replicas="2"),
        lambda: spec["headGroupSpec"]["rayStartParams"].update({"num-gpus": 0}),
        lambda: good["spec"].update(backofLimit=3),
        lambda: spec["authOptions"].update(mode="on"),
    ]
    for change in broken:
        _, good = documents(tmp_path / "k8s" / "rayjob.yaml")
        spec = good["spec"]["rayClusterSpec"]
        jsonschema.validate(good, SCHEMA)
        change()
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(good, SCHEMA)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "--nodes", "none"], "--nodes is 'none', but must be: hosts with GPUs, like 2"),
        (["slurm", "--time", "a day"], "--time is 'a day', but must be: time limit of the job, like 24:00:00"),
        (["slurm", "--time", "00:10:00"], "--warn-s 900 is not less than --time 00:10:00 (600 s)"),
        (["slurm", "--time", "7-00:00:00", "--warn-s", "65536"], "or more than Slurm's 65535"),
        (["slurm", "--image", "x"], "--image x is for k8s, not for slurm; drop it"),
        (["k8s", "--name", "My_Run"], "--name is 'My_Run'"),
        (["ray", "--colocated"], "unknown flag --colocated; did you mean --colocate?"),
        (["pbs"], "KIND is 'pbs', but must be one of slurm, k8s, ray"),
    ],
)
def test_a_wrong_number_is_refused_before_a_file_is_written(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, *more = words
    assert main(["cluster", "init", kind, str(tmp_path / "x"), *more]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["cluster", "init", "ray", str(tmp_path / "file")]) == 2
    assert f"cannot write to {tmp_path / 'file'}: File exists" in capsys.readouterr().err


def test_what_the_user_has_changed_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path, "slurm")
    (folder / "train.sh").write_text("exec slime train --my-flags\n")
    assert main(["cluster", "init", "slurm", str(folder)]) == 2
    assert f"{folder / 'train.sh'} exists and is different" in capsys.readouterr().err
    assert (folder / "train.sh").read_text() == "exec slime train --my-flags\n"


SLIME = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit({again}))
print("the run has begun", sys.argv[1:], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("status", "requeues"), [(AGAIN, ["requeue 77"]), (1, [])])
def test_the_job_of_slurm_requeues_a_run_that_is_not_complete_and_no_other(
    status: int, requeues: list[str], tmp_path: Path
) -> None:
    """Law: the signal before the time limit reaches the driver alone, and exit code 75 requeues the job."""
    shared, tools = tmp_path / "shared", tmp_path / "tools"
    shared.mkdir()
    tools.mkdir()
    folder = written(tmp_path, "slurm", "--gpus", "0", "--cpus", "1", "--shared", str(shared), *RUN_FLAGS)
    said = tmp_path / "said"
    (tools / "program.py").write_text(SLIME.format(again=status))
    programs = {
        "slime": f'exec {sys.executable} {tools}/program.py "$@"',
        "srun": "exec sleep 60",
        "scontrol": f'echo "$@" >> {said}',
        "python": f'exec {sys.executable} "$@"',
    }
    for name, line in programs.items():
        (tools / name).write_text(f"#!/bin/bash\n{line}\n")
        (tools / name).chmod(0o755)
    env = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1", "SLURM_CPUS_PER_TASK": "1"}
    env |= {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"} | env
    with subprocess.Popen(
        ["bash", str(folder / "job.sbatch")], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None
        until_s = time.monotonic() + 60
        while "the run has begun" not in (line := job.stdout.readline()):
            assert line and time.monotonic() < until_s, "the job ended early"
        assert re.search(r"'--ray-address', '\S+:6379', '--cluster-wait-s', '600'", line), line
        job.send_signal(signal.SIGUSR1)
        job.stdout.read()
        assert job.wait(30) == status
    assert (said.read_text().splitlines() if said.exists() else []) == requeues
