"""Laws of the stored schemas: they are what is installed, on any host, and every setting that code reads exists."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime.settings.all_flags import engine_flags, flag_table, own_flags
from slime.settings.args import Args
from slime.settings.fields import own_fields
from slime.settings.groups.launch_scripts import LaunchScriptSettings
from slime.settings.schema import OWNED, flags_of_owner

ROOT = Path(__file__).parents[3]

KINDS = ("int", "float", "str", "bool", "json", "human_int", "dtype", "int_or_json", "float_or_json", "str_or_json")


@pytest.mark.parametrize("owner", ["megatron", "sglang", "router"])
def test_entries_are_well_formed(owner: str) -> None:
    flags = flags_of_owner(owner)
    assert len({f.dest for f in flags}) == len(flags) > 50
    for flag in flags:
        assert flag.kind in KINDS and flag.names, flag
    assert set(OWNED[owner]) <= {f.dest for f in flags}


def test_no_default_names_a_place_on_the_host() -> None:
    for owner in ("megatron", "sglang", "router"):
        for flag in flags_of_owner(owner):
            assert not str(flag.default).startswith(("/home", "/root", "/usr", "/opt", "/var")), flag


def test_engine_spellings_do_not_collide_with_slimes() -> None:
    own = {n for f in own_flags() for n in (*f.names, *f.off_names)}
    for owner in ("megatron", "sglang", "router"):
        for flag in engine_flags(owner):
            taken = own & {*flag.names, *flag.off_names}
            assert not taken, f"{owner} {flag.dest}: {taken}"


def test_every_setting_that_the_code_reads_exists() -> None:
    known = {f.name for f in dataclasses.fields(Args)} | {"replace", "to_json_dict", "was_given", "without_secrets"}
    known |= {f.dest for f in flag_table().flags if f.owner in ("slime", "megatron")}
    stray = []

    def strange(name: str) -> bool:
        return name not in known and not hasattr(Path, name) and not hasattr(dict, name)

    for path in [*(ROOT / "slime").rglob("*.py"), ROOT / "train.py", ROOT / "train_async.py"]:
        source = path.read_text()
        if not any(strange(name) for name in re.findall(r"\bargs\s*\.\s*(\w+)", source)):
            continue  # to parse it takes time
        for node in ast.walk(ast.parse(source)):
            owner = getattr(node, "value", None)
            if not isinstance(node, ast.Attribute) or not isinstance(owner, ast.Name) or owner.id != "args":
                continue
            if strange(node.attr):
                stray.append(f"{path.name}: args.{node.attr}")
    assert not stray


def test_every_setting_is_read_somewhere() -> None:
    """A flag that nothing implements must not be accepted."""
    within_config = {
        "num_epoch",
        "num_steps_per_rollout",
        "custom_config_path",
        "offload",
        "grpo_std_normalization",
        "strict",
    }
    within_config |= {"megatron_config_path", "critic_lr"}  # applied by slime.settings.roles
    within_config |= {"memory_recorder"}  # there is one; the other is refused with what to use
    within_config |= {"use_tis", "use_opsm", "get_mismatch_metrics"}  # they choose --off-policy-corrections
    within_config |= {f.name for f in own_fields(LaunchScriptSettings)}  # see test_launch_scripts.py
    within_config |= {"balance_by_flops"}  # another is derived from it
    within_config |= {"check_weight_update_equal"}  # always so; switched off it is refused
    within_config |= {"compute_advantages_and_returns", "train_unsampled_tokens"}  # asked through conditions.py
    paths = [p for p in (ROOT / "slime").rglob("*.py") if (ROOT / "slime" / "settings") not in p.parents]
    makers = ("eval_config.py", "topology_yaml.py")  # of datasets that the rollout samples, and of engines that start
    paths += [ROOT / "slime" / "settings" / maker for maker in makers]
    text = "\n".join(p.read_text() for p in [*paths, ROOT / "train.py", ROOT / "train_async.py"])
    words = set(re.findall(r"\w+", text))
    assert not [f.dest for f in own_flags() if not f.internal and f.dest not in words | within_config]


@pytest.mark.slow
def test_the_stored_schemas_are_those_of_the_installed_packages() -> None:
    command = [sys.executable, "-m", "slime.cli.schemas"]  # of its own: other tests may have imported engines before
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert told.returncode == 0, f"run python -m slime.cli.schemas --write; {told.stdout[:1000]}{told.stderr[-1000:]}"


@pytest.mark.slow
def test_settings_build_megatrons_own_config_objects() -> None:
    import torch
    from megatron.core.optimizer import OptimizerConfig

    from slime.training.model.megatron_config import config_kwargs

    settings = {f.dest: f.default for f in flags_of_owner("megatron")} | {"lr": 1e-4, "exp_avg_dtype": "bfloat16"}
    kwargs = config_kwargs(OptimizerConfig, settings)
    assert kwargs == {"lr": 1e-4, "exp_avg_dtype": torch.bfloat16}
