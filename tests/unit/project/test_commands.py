"""The command line: what a start records is started again as it was, and every difference is told."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.cli.loops import import_from_here
from slime.cli.main import main
from slime.cli.rerun import Again, prepare, require_free, set_by
from slime.cli.serve import ONLY_SERVES, add_flags, words_of
from slime.core.errors import ConfigError, DataError
from slime.observability import start_record
from slime.observability.run_folder import RunFolder
from slime.observability.start_record import checkouts, environment, hide_secrets, input_files
from slime.settings import Args, parse_args
from slime.settings.command_line import without
from slime.settings.flag_parser import OVERRIDE
from tests.support.command_line import complete
from tests.support.marks import quick

REWARD = "def reward(args, sample, **kwargs):\n    return 1.0\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder outside of the checkout, left again after the test; so is what a command sets."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    environment, path = dict(os.environ), list(sys.path)
    os.environ.pop("PYTHONPATH", None)
    yield folder
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path


def started(flags: list[str], *, synchronous: bool = True) -> Args:
    """What `launch` records of a start, without the start."""
    args = parse_args(flags, synchronous=synchronous)
    RunFolder.create(args.run_dir, run_id=args.run_id, args=args.to_json_dict(), command=args.command)
    return args


def again(run: Path, *given: str, start: int = 0) -> Again:
    return prepare(run.resolve(), start, list(given))


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_rerun_has_the_settings_of_the_run(synchronous: bool, tmp_path: Path, here: Path) -> None:
    """Law: settings of a rerun equal those of the run, but for its id and its folder."""
    (here / "mine.py").write_text(REWARD)
    flags = [*complete(tmp_path), "--lr", "3e-6", "--custom-rm-path", "mine.py:reward", "--eps-clip=0.3"]
    args = started(flags, synchronous=synchronous)
    found = again(tmp_path / "run")
    now = parse_args(found.words, synchronous=synchronous)
    assert Path(now.run_dir) == tmp_path / "run-rerun" and now.run_id != args.run_id
    here_again = parse_args([*found.words, OVERRIDE, "--run-dir", args.run_dir], synchronous=synchronous)
    assert here_again.replace(run_id=args.run_id) == args
    told = [line for line in found.told if not line.startswith("code ")]  # someone may edit the checkout meanwhile
    assert told == [] and found.loop == ("train" if synchronous else "train-async")


def test_what_differs_is_told(tmp_path: Path, here: Path) -> None:
    """Law: another setting, another row of data, another line of a hook, another variable."""
    (here / "mine.py").write_text(REWARD)
    started([*complete(tmp_path), "--custom-rm-path", "mine.py:reward"])
    with (tmp_path / "data.jsonl").open("a") as data:
        data.write('{"input": "2+2", "label": "4"}\n')
    (here / "mine.py").write_text(REWARD.replace("1.0", "0.0"))
    os.environ["OMP_NUM_THREADS"] = "7"
    told = "\n".join(again(tmp_path / "run", "--num-rollout", "9").told)
    assert "setting num_rollout: 3 then, 9 now" in told
    assert f"file {tmp_path / 'data.jsonl'} (prompt_data): changed" in told
    assert f"file {here / 'mine.py'} (custom_rm_path): changed" in told
    assert "environment OMP_NUM_THREADS" in told and "7 now" in told


def test_outputs_of_the_run_are_not_written_again(tmp_path: Path) -> None:
    """Law: what lay in the run's folder lies in the new one; what lies elsewhere is refused while it is there."""
    run, elsewhere = tmp_path / "run", tmp_path / "export"
    save = str(run / "save")
    started([*complete(tmp_path), "--save", save, "--load", save, "--save-hf", str(elsewhere)])
    for folder in (elsewhere, run / "save" / "step_000000"):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="save-hf"):
        again(run)
    now = parse_args(again(run, "--save-hf", str(tmp_path / "other")).words)
    assert now.save == str(tmp_path / "run-rerun" / "save") and now.load is None, "it starts as the run did"
    with pytest.raises(ConfigError, match=r"--run-dir .* is not empty"):
        again(run, "--save-hf", str(tmp_path / "other"), "--run-dir", str(run))


def test_every_setting_that_names_a_place_is_an_output_or_is_known_not_to_be_one(tmp_path: Path) -> None:
    """Law: a new flag for a folder that a run writes is missed by nobody who asks what a run writes."""
    settings = json.loads(json.dumps(parse_args(complete(tmp_path)).to_json_dict()))
    names = {name for group in (settings, settings["components"]) for name in group}
    places = {name for name in names if re.search(r"(^|_)(dir|folder|details)$|^save($|_hf$|_debug_\w+_data$)", name)}
    assert places - start_record.OUTPUTS == NOT_OUTPUTS
    assert places >= start_record.OUTPUTS >= start_record.SHARED_OUTPUTS


NOT_OUTPUTS = {"update_weight_local_checkpoint_dir"}
"""On the hosts of engines, filled again by each run."""


OF_ONE_RUN = sorted(start_record.OUTPUTS - {"run_dir"})


@pytest.mark.parametrize("form", quick(["flag", "YAML"], "YAML"))
@pytest.mark.parametrize("name", OF_ONE_RUN)
def test_each_output_moves_with_the_folder(name: str, form: str, tmp_path: Path, here: Path) -> None:
    """Law: however an output was set, a rerun writes it into its own folder, or to where it is told to now."""
    run, flag = here / "runs" / "a", "--" + name.replace("_", "-")
    (here / "mine.yaml").write_text(f"run_dir: runs/a\n{name}: runs/a/out_{{rollout_id}}\n")
    words = complete(tmp_path)
    own = ["--custom-config-path", "mine.yaml"]
    if form == "flag":
        own = ["--run-dir", "runs/a", flag, "runs/a/out_{rollout_id}"]
    started([*without(words[:-1], "run_dir"), *own])
    found = set_by(again(run).words)
    assert found[name] == str(here / "runs" / "a-rerun" / "out_{rollout_id}")
    assert found["run_dir"] == str(here / "runs" / "a-rerun")
    assert set_by(again(run, flag, "elsewhere").words)[name] == "elsewhere"


@pytest.mark.parametrize("name", OF_ONE_RUN)
def test_an_output_elsewhere_is_not_written_over(name: str, tmp_path: Path) -> None:
    """Law: what many runs share is written to again; what is one run's is not, nor is an experiment in a shared one."""
    args, flag = parse_args(complete(tmp_path)), "--" + name.replace("_", "-")
    for folder in (tmp_path / "out" / "slime" / "mine", tmp_path / "out" / "other"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("")
    args = args.replace(**{name: str(tmp_path / "out")})
    if name not in start_record.SHARED_OUTPUTS:
        with pytest.raises(ConfigError, match=f"{flag} .* is not empty"):
            require_free(args, {name})
        require_free(args, {"lr"})
        return
    require_free(args, {name})
    require_free(args.replace(tb_experiment_name="new"), {name})
    if name == "tensorboard_dir":
        with pytest.raises(ConfigError, match="slime/mine is not empty"):
            require_free(args.replace(tb_experiment_name="mine"), {name})


def test_a_rerun_never_writes_into_the_checkpoints_of_a_run_from_a_file(tmp_path: Path, here: Path) -> None:
    """Law: `save`, `load` and records of a YAML file are redirected or refused, as those of flags are."""
    save, elsewhere = here / "runs" / "first" / "save", tmp_path / "elsewhere"
    (here / "mine.yaml").write_text(
        "run_dir: runs/first\nsave: runs/first/save\nload: runs/first/save\nsave_hf: runs/first/save/hf\n"
        f"save_debug_train_data: {elsewhere}/train_{{rollout_id}}.npz\n"
        f"save_debug_rollout_data: {elsewhere}/{{rollout_id}}.pt\n"
    )
    started([*without(complete(tmp_path)[:-1], "run_dir"), "--custom-config-path", "mine.yaml"])
    (save / "step_000000").mkdir(parents=True)
    (save / "step_000000" / "manifest.json").write_text("{}")
    now = parse_args(again(here / "runs" / "first").words)
    target = here / "runs" / "first-rerun"
    assert (now.run_dir, now.save, now.save_hf) == (str(target), str(target / "save"), str(target / "save" / "hf"))
    assert now.load is None, "it starts as the run did"
    now = parse_args(again(here / "runs" / "first", "--save", str(tmp_path / "other")).words)
    assert (now.save, now.load) == (str(tmp_path / "other"), None)
    elsewhere.mkdir()
    for name, flag in (("train_0.npz", "--save-debug-train-data"), ("0.jsonl.zst", "--save-debug-rollout-data")):
        (elsewhere / name).write_text("")
        with pytest.raises(ConfigError, match=f"{flag} .* is not empty"):
            again(here / "runs" / "first")
        again(here / "runs" / "first", flag, str(tmp_path / "new_{rollout_id}"))
        (elsewhere / name).unlink()


def test_another_start_of_a_resumed_run(tmp_path: Path) -> None:
    flags = complete(tmp_path)
    started(flags)
    started([*flags, OVERRIDE, "--num-rollout", "5"])
    assert parse_args(again(tmp_path / "run").words).num_rollout == 3
    assert parse_args(again(tmp_path / "run", start=1).words).num_rollout == 5
    with pytest.raises(DataError, match="are 0 to 1"):
        again(tmp_path / "run", start=2)


def test_a_start_that_resumed_loads_what_it_loaded(tmp_path: Path) -> None:
    """Law: a start after the first one begins with the checkpoint that it had, wherever the rerun writes its own."""
    run = tmp_path / "run"
    save = str(run / "save")
    flags = [*complete(tmp_path), "--save", save, "--load", save]
    started(flags)
    for step in (1, 4):
        (run / "save" / f"step_{step:06d}").mkdir(parents=True)
        (run / "save" / f"step_{step:06d}" / "manifest.json").write_text("{}")
    started([*flags, OVERRIDE, "--num-rollout", "9"])
    with pytest.raises(
        DataError,
        match=r"does not record the checkpoint that --start 1 loaded; add --load \S+/run/save --ckpt-step N",
    ):
        again(run, start=1)
    named = parse_args(again(run, "--ckpt-step", "4", start=1).words)
    assert (named.load, named.ckpt_step) == (save, 4)
    (run / "metrics.jsonl").write_text(json.dumps({"time": time.time() + 1, "rollout/step": 2}) + "\n")
    record = json.loads((run / "run.json").read_text())
    record["starts"][0]["time"] = "2026-01-31T12:00:00+0000"
    (run / "run.json").write_text(json.dumps(record))
    for given in ([], ["--save", str(tmp_path / "other")]):
        now = parse_args(again(run, *given, start=1).words)
        assert (now.load, now.ckpt_step, now.num_rollout) == (save, 1, 9)
    assert parse_args(again(run).words).load is None, "the first start began from the model"


def test_a_folder_given_now_is_one_of_here(tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(complete(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert parse_args(again(tmp_path / "run", "--run-dir", "next").words).run_dir == str(tmp_path / "next")


def test_only_paths_below_the_run_folder_are_taken_as_moved(tmp_path: Path) -> None:
    """Law: `runs/a` is no part of `runs/ab`."""
    beside = tmp_path / "run-data" / "more.jsonl"
    beside.parent.mkdir()
    flags = complete(tmp_path)
    beside.write_bytes((tmp_path / "data.jsonl").read_bytes())
    started([*flags, "--prompt-data", str(beside)])
    assert not [line for line in again(tmp_path / "run").told if "prompt_data" in line]


def test_secrets_are_told_of_and_not_kept(tmp_path: Path) -> None:
    started([*complete(tmp_path), "--use-wandb", "--wandb-key", "hush-hush", "--train-env-vars", '{"HF_TOKEN": "abc"}'])
    run = tmp_path / "run"
    records = [path for path in run.rglob("*") if path.is_file() and path.suffix != ".diff"]
    written = "".join(path.read_text() for path in records)
    assert len(records) == 3 and "hush-hush" not in written and '"abc"' not in written
    found = again(run)
    assert "--wandb-key was a secret and is not recorded; set it again if needed" in found.told
    assert "--wandb-key" not in found.words


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rerun", str(tmp_path)]) == 2
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"command": ["train.py"]}]}))
    assert main(["rerun", str(tmp_path)]) == 2
    assert "earlier release" in capsys.readouterr().err


def test_files_that_settings_name(tmp_path: Path) -> None:
    """Law: a slice, a folder, a template and a function lead to files; what the run writes is none of them."""
    for name in ("rows.jsonl", "model/config.json", "rollouts/0.zst", "rollouts/1.zst", "hook.py", "out/old"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    settings = {
        "prompt_data": f"{tmp_path}/rows.jsonl@[0:5]",
        "hf_checkpoint": f"{tmp_path}/model",
        "load_debug_rollout_data": f"{tmp_path}/rollouts/{{rollout_id}}.zst",
        "custom_rm_path": f"{tmp_path}/hook.py:reward",
        "save": f"{tmp_path}/out",
        "loss_type": "policy_loss",
        "buffer_filter_path": "tests.support.command_line:complete",
    }
    found = {one["path"]: one["setting"] for one in input_files(settings)}
    assert {Path(path).name for path in found} == {
        *("rows.jsonl", "config.json", "0.zst", "1.zst", "hook.py", "command_line.py")
    }
    assert all(one["sha256"] and one["hashed"] == "all" for one in input_files(settings))


def test_files_below_folders_and_no_more_than_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: `**` finds files at any depth; once so many bytes were hashed, of a large file only the ends are."""
    monkeypatch.setattr(start_record, "END_BYTES", 4)
    monkeypatch.setattr(start_record, "MAX_TOTAL_BYTES", 30)
    for name in ("a.jsonl", "deep/b.jsonl", "deep/deeper/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("0123456789abcdefghij")
    found = input_files({"prompt_data": f"{tmp_path}/**/*.jsonl"})
    assert [Path(one["path"]).name for one in found] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert [one["hashed"] for one in found] == ["all", "ends", "ends"]


def test_changes_that_git_does_not_tell_are_not_taken_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": str(tmp_path), "ls-files": "code.py"}
    monkeypatch.setattr(start_record, "_git", lambda where, *words: answers.get(words[0]))
    (found,) = checkouts(tmp_path)
    assert (found.diff, found.diff_sha256) == ("", start_record.NOT_READ)


def test_uncommitted_changes_are_kept_without_secrets(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / ".env").write_text("A=1\n")
    git("init", "-q")
    git("add", "code.py", ".env")
    git("commit", "-qm", "one")
    (clean,) = checkouts(tmp_path, tmp_path / "code.py")
    assert clean.diff == "" and clean.diff_sha256 is None
    (tmp_path / "code.py").write_text("x = 2\napi_key = 'abcdefghijkl'\n")
    (tmp_path / ".env").write_text("A=very-secret\n")
    (changed,) = checkouts(tmp_path)
    assert "+x = 2" in changed.diff and changed.commit == clean.commit and changed.diff_sha256
    assert "abcdefghijkl" not in changed.diff and "very-secret" not in changed.diff


def test_variables_that_matter_and_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN", "SOMETHING_ELSE"):
        monkeypatch.setenv(name, "3")
    assert {"OMP_NUM_THREADS"} <= environment().keys()
    assert not {"HF_TOKEN", "WANDB_API_KEY", "RAY_AUTH_TOKEN", "SOMETHING_ELSE"} & environment().keys()
    assert hide_secrets(["--train-env-vars", '{"HF_TOKEN": "x", "B": "y"}'])[1] == '{"HF_TOKEN": "<hidden>", "B": "y"}'


def test_serve_is_the_loop_that_only_serves() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    options, options_more = parser.parse_known_args(["--hf-checkpoint", "m", "--port", "8123"])
    options.words = options_more
    assert words_of(options) == ["--router-port", "8123", "--hf-checkpoint", "m", OVERRIDE, *ONLY_SERVES]


def test_no_flag_makes_serve_train(tmp_path: Path) -> None:
    options = argparse.Namespace(port=8123, host=None, words=complete(tmp_path))
    args = parse_args(words_of(options))
    assert args.debug_rollout_only and args.num_rollout == 0


@pytest.mark.parametrize("command", ["train", "train-async", "serve"])
def test_a_module_with_a_name_of_pythons_own_is_refused(
    command: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: the working folder comes before the standard library in the processes of a run."""
    (here / "my_random.py").write_text("")
    import_from_here()
    del os.environ["PYTHONPATH"]
    (here / "random.py").write_text("")
    assert main([command, "--hf-checkpoint", "m"]) == 2
    assert f"would import {here / 'random.py'} instead of" in capsys.readouterr().err


ENTRY = """
from dataclasses import dataclass
from slime.algorithms.advantages import ESTIMATORS
from slime.algorithms.advantages.grpo import GroupRelative

@ESTIMATORS.register("mine")
@dataclass(frozen=True, kw_only=True)
class Mine(GroupRelative):
    rank_scale: float = 1.0
"""


def test_a_registry_entry_is_imported_from_the_working_folder(here: Path, tmp_path: Path) -> None:
    """Law: a module of the working folder is found by its name, as hooks are, and brings its own flags."""
    (here / "my_pkg").mkdir()
    (here / "my_pkg" / "__init__.py").write_text("")
    (here / "my_pkg" / "mine.py").write_text(ENTRY)
    command = [str(Path(sys.executable).with_name("slime")), "train", *complete(tmp_path), "--explain"]
    command += ["--advantage-estimator", "my_pkg.mine:Mine", "--rank-scale", "0.5"]
    shown = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "rank_scale = 0.5" in shown.stdout


def test_serving_needs_no_data(tmp_path: Path) -> None:
    flags = complete(tmp_path)
    args = parse_args([*ONLY_SERVES, *flags[:2]])
    assert args.debug_rollout_only and args.num_rollout == 0 and not args.prompt_data


BROKEN = (
    *(b"\xff\xfe\x00", b"[]", b'"x"', b"3", b"null", b"{", b"[" * 100_000, b'{"starts": {}}', b'{"starts": [1]}'),
    *(b'{"starts": [{"command": 3}]}', b'{"train/step": {}}', b'{"train/step": "x"}', b'{"train/step": Infinity}'),
)
"""What may stand in a file of a run folder after a disk, an editor or another program had it."""


@pytest.mark.parametrize("content", BROKEN, ids=lambda content: content[:30].decode("latin-1"))
@pytest.mark.parametrize("file", ["run.json", "starts/0/args.json", "metrics.jsonl", "samples.jsonl"])
def test_a_broken_record_ends_a_command_with_a_sentence(
    tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str], file: str, content: bytes
) -> None:
    run = tmp_path / "run"
    (run / "starts" / "0").mkdir(parents=True)
    start = {"command": ["slime", "train"], "cwd": str(tmp_path), "time": "now", "code": [], "files": []}
    (run / "run.json").write_text(json.dumps({"starts": [{**start, "environment": {}, "versions": {}, "host": {}}]}))
    (run / file).write_bytes(content)
    command = {"metrics.jsonl": "report", "samples.jsonl": "samples"}.get(file, "rerun")
    assert main([command, str(run)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"slime {command}: ") and str(run) in said and said.count("\n") == 1
