"""Law: processes on a cluster get the mark of the run, its modules and its settings by name, and no secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slime.cluster.launch_run import JOINED_RAY, NCCL, enter_start_folder, for_actors, prepare_environment
from slime.core.processes import RUN_ID_ENV
from slime.serving.child_process import KEEP_ENVIRON_ENV

ROOT = Path(__file__).parents[3]
DRIVER = {
    RUN_ID_ENV: "run-1",
    "NCCL_CUMEM_ENABLE": "0",
    "SGLANG_LOGGING": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_TOKEN": "hf_x",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "2",
    "WANDB_API_KEY": "w",
    "MY_SERVICE": "here",
    "PATH": "/bin",
    "PYTHONPATH": f"/nowhere/modules{os.pathsep}",
}


def test_what_means_the_same_everywhere_goes_by_name() -> None:
    found = for_actors(DRIVER, named=["MY_SERVICE"])
    assert found[RUN_ID_ENV] == "run-1" and found[KEEP_ENVIRON_ENV] == "1" and found["MY_SERVICE"] == "here"
    assert {"NCCL_CUMEM_ENABLE", "SGLANG_LOGGING", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"} <= found.keys()
    assert "TOKENIZERS_PARALLELISM" in found
    assert not {"HF_TOKEN", "WANDB_API_KEY", "PATH"} & found.keys()
    assert "HF_TOKEN" in for_actors(DRIVER, named=["HF_TOKEN"]), "unless it is asked for"


def test_modules_of_ours_and_of_the_user_are_found() -> None:
    paths = for_actors(DRIVER)["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(ROOT) and "/nowhere/modules" in paths and "" not in paths
    assert not any("site-packages" in path for path in paths), "every host has its own installation"


def test_relative_paths_mean_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    variables = for_actors(DRIVER)
    monkeypatch.chdir("/")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    enter_start_folder()
    assert Path.cwd() == tmp_path


def test_variables_of_a_ray_job_do_not_contradict_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray job submit --runtime-env-json` may set PYTHONPATH; Ray refuses a variable that both set, unless told."""
    for name in (*JOINED_RAY, *NCCL, RUN_ID_ENV):
        monkeypatch.setenv(name, "")
    prepare_environment("run-2", ray_address="10.0.0.1:6379")
    assert os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] == "1"
