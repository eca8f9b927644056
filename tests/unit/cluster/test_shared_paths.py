"""Law: a folder that a host does not see as the driver does is named with its host, and no token is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.hosts import contract_of, not_seen, require_same_versions, require_seen, versions_here
from slime.core.errors import ConfigError


@pytest.fixture
def args(tmp_path: Path) -> Any:
    """Settings of a run with all its folders below `tmp_path`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "run").mkdir()
    return SimpleNamespace(
        save=str(tmp_path / "deep" / "save"),
        save_hf=str(tmp_path / "export" / "step_{rollout_id}"),
        update_weight_transport="disk",
        components={"update_weight_disk_dir": str(tmp_path / "run" / "weights")},
        hf_checkpoint=str(tmp_path / "model"),
        load=None,
        ref_load=str(tmp_path / "model"),
        initial_weights=None,
        critic_load=None,
        opd_teacher_load=None,
        sglang_config=None,
    )


def test_a_host_that_sees_all_says_nothing(args: Any, tmp_path: Path) -> None:
    with contract_of(args, tmp_path / "run") as contract:
        assert set(contract.tokens) == {"--run-dir", "--save", "--save-hf", "--update-weight-disk-dir"}
        assert contract.tokens["--save-hf"][0].startswith(str(tmp_path / "export" / ".seen-by-every-host"))
        assert not_seen(contract, limit_s=0) == []
        require_seen({"b (10.0.0.2)": []})
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["config.json", "model", "run"], "what was made is removed"


def test_each_kind_of_blindness_is_told(args: Any, tmp_path: Path) -> None:
    """Another file system below the same path; other files in a copy of the model; no such folder."""
    with contract_of(args, tmp_path / "run") as contract:
        Path(contract.tokens["--save"][0]).unlink()
        Path(contract.tokens["--save-hf"][0]).write_text("another run's")
        (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
        problems = not_seen(contract, limit_s=0)
        with pytest.raises(ConfigError, match=r"b \(10.0.0.2\) does not see --save .*deep/save \(No such file") as told:
            require_seen({"a (10.0.0.1)": [], "b (10.0.0.2)": problems})
        assert "--save-hf" in str(told.value) and "a different folder has this path" in str(told.value)
        assert "--hf-checkpoint" in str(told.value) and "--ref-load" in str(told.value)
        assert "a (10.0.0.1)" not in str(told.value) and "same path" in str(told.value)


def test_hosts_with_other_versions_are_named_with_both_versions() -> None:
    """Law: one message names each such host, what it has and what the driver's host has; what only one has is fine."""
    driver = {"Python": "3.12.1", "torch": "2.11.0", "slime": "0.1.0 with sources aa"}
    found = {
        "b (10.0.0.2)": {**driver, "sglang": "0.5.16"},
        "c (10.0.0.3)": {**driver, "torch": "2.10.0", "slime": "0.1.0 with sources bb"},
        "d (10.0.0.4)": {**driver, "Python": "3.12.2"},
    }
    with pytest.raises(ConfigError) as told:
        require_same_versions("a (10.0.0.1)", {**driver, "ray": "2.60.0"}, found)
    assert str(told.value).startswith(
        "hosts have different versions: c (10.0.0.3) has torch 2.10.0 and slime 0.1.0 with sources bb, but a "
        "(10.0.0.1) has torch 2.11.0 and slime 0.1.0 with sources aa; d (10.0.0.4) has Python 3.12.2, but a "
        "(10.0.0.1) has Python 3.12.1; "
    )
    require_same_versions("a (10.0.0.1)", driver, {"b (10.0.0.2)": found["b (10.0.0.2)"]})


def test_the_versions_of_a_host_are_those_that_its_packages_say() -> None:
    import platform

    import ray
    import torch

    here = versions_here()
    assert here["Python"] == platform.python_version() and here["ray"] == ray.__version__
    assert here["torch"] == torch.__version__ and here == versions_here()


def test_a_run_under_way_does_not_list_what_it_writes(args: Any, tmp_path: Path) -> None:
    """Law: a host that comes back while a checkpoint is being written sees the same folders nevertheless."""
    for name in ("load", "save"):
        (tmp_path / name).mkdir()
    args.load, args.save, args.critic_load = str(tmp_path / "load"), str(tmp_path / "save"), str(tmp_path / "save")
    with contract_of(args, tmp_path / "run") as contract:
        assert set(contract.digests) == {"--hf-checkpoint", "--ref-load", "--load", "--critic-load"}
    with contract_of(args, tmp_path / "run", under_way=True) as contract:
        (tmp_path / "load" / "new").write_text("half")
        (tmp_path / "save" / "new").write_text("half")
        assert set(contract.digests) == {"--hf-checkpoint", "--ref-load"} and not_seen(contract, limit_s=0) == []


def test_a_copy_of_the_model_will_do(args: Any, tmp_path: Path) -> None:
    with contract_of(args, tmp_path / "run") as contract:
        shutil.move(tmp_path / "model", tmp_path / "away")
        assert any("no such folder" in problem for problem in not_seen(contract, limit_s=0))
        shutil.copytree(tmp_path / "away", tmp_path / "model")
        assert not_seen(contract, limit_s=0) == []
