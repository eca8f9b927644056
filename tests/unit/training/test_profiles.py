"""Profiles: the asked parts of the asked steps, whole files, and nothing otherwise."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.settings import Args, parse_args
from slime.settings.groups.logging import traces_engines
from slime.training.step.profiles import Profiles
from tests.support.command_line import complete, listed, refused

CPU = torch.device("cpu")
STEPS = ["--use-pytorch-profiler", "--profile-step-start", "1", "--profile-step-end", "2"]


def parsed(folder: Path, *words: str) -> Args:
    """Settings of three steps on one CPU rank."""
    return parse_args([*complete(folder), "--device", "cpu", "--strict", *words])


def work(profiles: Profiles, rollout_id: int) -> None:
    """What the trainer does around its passes."""
    with profiles.step(rollout_id):
        with profiles.part("train_log_probs", rollout_id):
            torch.ones(3).cumsum(0)
        with profiles.part("train_actor", rollout_id):
            torch.ones(3, 3).logsumexp(0)


def traces(args: Args) -> dict[str, set[str]]:
    """Names of the events in each trace of a run."""
    found: dict[str, set[str]] = {}
    for path in sorted((Path(args.run_dir) / "profiles").glob("*")):
        content: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        found[path.name] = {str(event.get("name")) for event in content["traceEvents"]}
    return found


def test_the_asked_step_is_traced_and_no_other(tmp_path: Path) -> None:
    args = parsed(tmp_path, *STEPS)
    profiles = Profiles(args, 0, CPU)
    for rollout_id in range(3):
        work(profiles, rollout_id)
    ((name, events),) = traces(args).items()
    assert name == "step_1_train_overall_rank_0.json.gz"
    assert {"aten::cumsum", "aten::logsumexp", "train_log_probs", "train_actor"} <= events


def test_a_part_has_a_trace_of_its_own(tmp_path: Path) -> None:
    args = parsed(tmp_path, *STEPS, "--profile-target", "train_actor", "train_log_probs")
    work(Profiles(args, 0, CPU), 1)
    found = traces(args)
    actor, passes = found["step_1_train_actor_rank_0.json.gz"], found["step_1_train_log_probs_rank_0.json.gz"]
    assert len(found) == 2 and "aten::logsumexp" in actor and "aten::cumsum" in passes
    assert "aten::cumsum" not in actor and "aten::logsumexp" not in passes


def test_a_step_that_fails_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    args = parsed(tmp_path, *STEPS)
    profiles = Profiles(args, 0, CPU)
    with pytest.raises(ZeroDivisionError), profiles.step(1):
        torch.ones(1 // 0)
    assert traces(args) == {}
    work(profiles, 1)
    assert len(traces(args)) == 1, "the profiler was let go"


@pytest.mark.parametrize(("words", "rank"), [(STEPS, 1), ([], 0)])
def test_who_is_not_asked_runs_without_a_profiler(tmp_path: Path, words: list[str], rank: int) -> None:
    args = parsed(tmp_path, *words)
    profiles = Profiles(args, rank, CPU)
    assert isinstance(profiles.part("train_overall", 1), nullcontext)
    work(profiles, 1)
    assert traces(args) == {}


def test_engines_are_traced_while_they_generate_the_asked_steps(tmp_path: Path) -> None:
    args = parsed(tmp_path, *STEPS, "--profile-target", "rollout", "--profile-engine-passes", "3")
    assert [traces_engines(args, step) for step in range(3)] == [False, True, False]
    assert isinstance(Profiles(args, 0, CPU).part("train_overall", 1), nullcontext)
    external = [*complete(tmp_path / "b"), *STEPS, "--profile-target", "rollout"]
    external += ["--rollout-external-engine-addrs", "h:1"]
    assert "use their /start_profile route" in refused(external)


REFUSED = [
    ("--use-pytorch-profiler --profile-step-start 2 --profile-step-end 2", "so no step would be traced"),
    ("--use-pytorch-profiler --profile-step-start 1 --profile-ranks 1", "use 0 to 0"),
    ("--use-pytorch-profiler --profile-target everything", "train_overall, train_actor, train_log_probs, rollout"),
    ("--record-memory-history --device cpu", "keeps no history; drop it, or run on CUDA"),
    ("--record-memory-history --memory-recorder memray", "attach memray"),
    (
        "--record-memory-history --device cuda --memory-snapshot-path a/b.pickle",
        "set the folder with --memory-snapshot-dir",
    ),
    (
        "--use-pytorch-profiler --profile-step-start 1 --debug-rollout-only --profile-target rollout train_actor",
        "--profile-target contains train_actor, which does not run with --debug-rollout-only",
    ),
    ("--profile", "use --use-pytorch-profiler"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_cannot_be_profiled_is_refused(tmp_path: Path, words: str, said: str) -> None:
    assert said in refused([*complete(tmp_path), *words.split()])


def test_what_would_trace_nothing_is_listed(tmp_path: Path) -> None:
    args = parse_args([*complete(tmp_path), "--use-pytorch-profiler"])  # 3 steps; the default begins at the tenth
    assert "use_pytorch_profiler True, which needs a --profile-step-start below --num-rollout" in listed(args)
    assert "--record-memory-history" in listed(parse_args([*complete(tmp_path / "b"), "--memory-snapshot-dir", "x"]))


IDLE = [
    (f"{' '.join(STEPS)} --debug-rollout-only", "use_pytorch_profiler True, which needs a --profile-target that runs"),
    (
        f"{' '.join(STEPS)} --profile-target rollout --load-debug-rollout-data {{folder}}/x.jsonl.zst",
        "use_pytorch_profiler True, which needs a --profile-target that runs",
    ),
    ("--device cuda --debug-rollout-only --record-memory-history", "record_memory_history True, which needs training"),
    (
        "--device cuda --record-memory-history --memory-snapshot-num-steps 4",
        "memory_snapshot_num_steps 4, which needs a --num-rollout of at least as many steps",
    ),
]


@pytest.mark.parametrize(("words", "said"), IDLE)
def test_what_no_part_of_the_run_reads_is_listed(tmp_path: Path, words: str, said: str) -> None:
    (tmp_path / "x.jsonl.zst").touch()
    assert said in listed(parse_args([*complete(tmp_path / "run"), *words.format(folder=tmp_path).split()]))


def test_the_part_that_runs_is_traced_and_nothing_is_listed(tmp_path: Path) -> None:
    rollout = parsed(tmp_path / "a", *STEPS, "--debug-rollout-only", "--profile-target", "rollout")
    assert traces_engines(rollout, 1)
    last = ["--record-memory-history", "--memory-snapshot-num-steps", "3"]
    assert parse_args([*complete(tmp_path / "b"), "--device", "cuda", *last]).memory_snapshot_num_steps == 3
