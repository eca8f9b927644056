"""The runs that the end-to-end tests look at: each is made once, when a test first asks for it.

Three runs cover the loop between them:

| fixture         | loop  | placement | ranks | weights by  | model          |
|-----------------|-------|-----------|-------|-------------|----------------|
| `plain_run`     | sync  | decoupled | 1     | tensor      | Qwen3          |
| `async_run`     | async | decoupled | DP 2  | distributed | Llama, tied    |
| `colocated_run` | sync  | colocated | TP 2  | disk        | Qwen3          |

`async_run` has few steps; `long_async_run` is long enough to learn. All but `plain_run` are slow. `plain_run` also
changes its learning rate, saves every step, records its rollouts and shows itself to W&B and TensorBoard; the tests of
resume repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.tiny.tasks import DIGITS_FILE, write_all
from tests.support.e2e import (
    NUM_STEPS,
    PROMPTS_PER_STEP,
    SAMPLES_PER_PROMPT,
    Flags,
    RealRun,
    Recorded,
    digits_task,
    started_and_finished,
)
from tests.support.marks import quick

FLOAT32 = ["--no-bf16"]
CONSTANT_LR = ["--lr", "2e-2", "--lr-decay-style", "constant"]
RUNS = ("plain_run", "async_run", "colocated_run", "long_async_run")
CHANGING_LR = ["--lr", "2e-2", "--lr-warmup-iters", "2", "--lr-decay-style", "linear", "--min-lr", "1e-2"]


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the toy tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    write_all(folder)
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for run folders."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def digits(tasks: Path) -> Callable[[Path], Flags]:
    """Flags of GRPO on the digits task with a given model, in float32, without a learning rate."""

    def flags(model: Path) -> Flags:
        return [
            *digits_task(model, tasks / DIGITS_FILE),
            "--rollout-batch-size",
            str(PROMPTS_PER_STEP),
            "--n-samples-per-prompt",
            str(SAMPLES_PER_PROMPT),
            "--rollout-max-response-len",
            "24",
            "--num-rollout",
            str(NUM_STEPS),
            *FLOAT32,
        ]

    return flags


@pytest.fixture(scope="session")
def recorded(runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path) -> Recorded:
    """`plain_run` with what it wrote."""
    save, rollouts = runs / "plain-save", str(runs / "plain-rollouts" / "{rollout_id}.jsonl.zst")
    flags: Flags = [*digits(tiny_qwen3), "--update-weight-transport", "tensor", *CHANGING_LR]
    saving: Flags = ["--save", save, "--save-interval", "1", "--save-debug-rollout-data", rollouts]
    views: Flags = ["--use-wandb", "--wandb-mode", "offline", "--use-tensorboard"]
    return Recorded(started_and_finished(runs / "plain", [*flags, *saving, *views]), flags, save, rollouts)


@pytest.fixture(scope="session")
def plain_run(recorded: Recorded) -> RealRun:
    """Synchronous, decoupled, one rank, weights by tensor."""
    return recorded.run


@pytest.fixture(scope="session")
def async_flags(digits: Callable[[Path], Flags], tiny_llama: Path) -> Flags:
    """Asynchronous, decoupled, DP 2, weights through a process group."""
    where = ["--actor-num-gpus-per-node", "2", "--update-weight-transport", "distributed"]
    return [*digits(tiny_llama), *CONSTANT_LR, *where]


@pytest.fixture(scope="session")
def async_run(runs: Path, async_flags: Flags) -> RealRun:
    """Few steps."""
    return started_and_finished(runs / "async", [*async_flags, "--num-rollout", "4"], script="train_async.py")


@pytest.fixture(scope="session")
def long_async_run(runs: Path, async_flags: Flags) -> RealRun:
    """As many steps as the others."""
    return started_and_finished(runs / "long-async", async_flags, script="train_async.py")


@pytest.fixture(scope="session")
def colocated_run(runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path) -> RealRun:
    """Synchronous, one engine on the slots of two tensor-parallel ranks, weights from disk."""
    where = ["--colocate", "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"]
    engines = ["--rollout-num-gpus", "1", "--update-weight-transport", "disk"]
    return started_and_finished(runs / "colocated", [*digits(tiny_qwen3), *CONSTANT_LR, *where, *engines])


@pytest.fixture(scope="session", params=quick(RUNS, "plain_run"))
def any_run(request: pytest.FixtureRequest) -> RealRun:
    """Each of them in turn."""
    run: RealRun = request.getfixturevalue(request.param)
    return run
