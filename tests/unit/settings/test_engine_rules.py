"""Law: every group of engines is held to the rules by its own width, settings and checkpoint, and named if it breaks
one; without a file there is one group, that of the flags."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.core.topology import EngineLayout
from slime.settings import Args, parse_args
from slime.settings.topology_yaml import STAGES_ENV, layout_of_group, topology_of
from tests.support.command_line import QWEN3, refused
from tests.support.published import SYNCED

Fleet = Callable[..., list[str]]
"""Models of a file, given as lists of groups by name -> flags. `judge` has a checkpoint of its own."""


@pytest.fixture
def fleet(base: list[str], tmp_path: Path) -> Fleet:
    def made(**groups: list[dict[str, Any]]) -> list[str]:
        judge = tmp_path / "judge"
        judge.mkdir()
        (judge / "config.json").write_text(json.dumps({**QWEN3, "num_attention_heads": 6, "num_key_value_heads": 6}))
        paths = {"judge": {"model_path": str(judge)}}
        models = [{"name": name, "server_groups": some, **paths.get(name, {})} for name, some in groups.items()]
        file = tmp_path / "fleet.yaml"
        file.write_text(yaml.safe_dump({"sglang": models}))
        return [*base, "--sglang-config", str(file)]

    return made


def group(width: int = 1, num_gpus: int | None = None, worker: str = "regular", **overrides: Any) -> dict[str, Any]:
    return {
        "num_gpus": num_gpus or width,
        "num_gpus_per_engine": width,
        "worker_type": worker,
        "overrides": overrides,
    }


RETRACT = ["--fully-async", "--pause-generation-mode", "retract"]
BROKEN: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "heads": (group(3), [], "3 ranks of an engine that share .* 4 attention heads"),
    "copies": (group(2, dp_size=2), [], "needs --sglang-enable-dp-attention"),
    "stages": (group(3, pp_size=2), [], "sglang_pp_size 2 does not divide the 3 GPUs of an engine"),
    "stages of the run": (group(1), ["--sglang-pp-size", "2"], "pp_size 2 does not divide the 1 GPUs"),
    "experts of a dense model": (group(2, ep_size=2), ["--device", "cuda"], "0 experts"),
    "experts on a CPU": (group(2, ep_size=2), [], "sglang_ep_size 2 does not work on a CPU"),
    "quantised": (group(quantization="fp8"), [], "quantization fp8"),
    "stages that do not pause": (
        group(2, pp_size=2),
        RETRACT,
        "sglang_pp_size 2: SGLang's pipeline stages do not pause",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_group_of_the_policy_that_breaks_a_rule_is_named(what: str, fleet: Fleet) -> None:
    broken, flags, said = BROKEN[what]
    message = refused([*fleet(policy=[group(2), broken]), *flags], synchronous=flags != RETRACT)
    assert "sglang[0] (policy).server_groups[1]: " in message
    assert re.search(said, message), message


def test_the_width_of_the_flags_is_no_engines_where_a_file_has_groups(fleet: Fleet) -> None:
    args = parse_args([*fleet(policy=[group(2)], judge=[group(2)]), "--sglang-pp-size", "2"])
    assert args.rollout_num_gpus_per_engine == 1
    assert [layout.pp_size for layout in layouts(args)] == [2, 2]


def test_a_frozen_model_is_held_to_its_own_checkpoint(fleet: Fleet) -> None:
    assert len(layouts(parse_args(fleet(policy=[group(4)], judge=[group(3)])))) == 2


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (group(4), "4 ranks of an engine that share .* 6 attention heads"),
        (group(1, dp_size=2), "sglang_dp_size 2"),
        (group(2, ep_size=2), "sglang_ep_size 2 does not work on a CPU"),
        (group(1, pp_size=2), "sglang_pp_size 2"),
    ],
)
def test_a_frozen_model_that_breaks_a_rule_is_named(broken: dict[str, Any], said: str, fleet: Fleet) -> None:
    message = refused(fleet(policy=[group()], judge=[broken]))
    assert "sglang[1] (judge).server_groups[0]: " in message
    assert re.search(said, message), message


def test_what_the_trainer_sends_binds_the_policy_alone(fleet: Fleet) -> None:
    judge = group(2, pp_size=2, quantization="fp8", disable_radix_cache=False)
    args = parse_args([*fleet(policy=[group()], judge=[judge]), *RETRACT], synchronous=False)
    assert args.pause_generation_mode == "retract"


def test_a_placeholder_is_no_engine(fleet: Fleet) -> None:
    parse_args(fleet(policy=[group(), group(3, worker="placeholder", dp_size=2)]))


def test_the_layers_of_stages_in_the_environment_are_the_policys(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAGES_ENV, "2,0")
    policy, judge = layouts(parse_args(fleet(policy=[group(2, pp_size=2)], judge=[group(2, pp_size=2)])))
    assert (policy.stage_layers, judge.stage_layers) == ((2, 0), ())


def test_a_file_that_changed_is_read_again(fleet: Fleet) -> None:
    flags = fleet(policy=[group(1)])
    args = parse_args(flags)
    assert topology_of(args) is topology_of(args), "what has been read is not parsed for each rule"
    file = Path(str(args.sglang_config))
    before = file.stat()
    file.write_text(file.read_text().replace("name: policy", "name: polity"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [model.name for model in topology_of(args).models] == ["polity"]


BESIDE = ["--device", "cuda", "--colocate", "--actor-num-gpus-per-node", "2"]


@pytest.mark.parametrize(
    ("groups", "transport"),
    [
        ({"policy": [group(1, 2)], "judge": [group(1, 2)]}, "tensor"),
        ({"policy": [group(1, 2), group(2, worker="placeholder")]}, "tensor"),
        ({"judge": [group(1, 1)], "policy": [group(1, 2)]}, "mixed"),
        ({"judge": [group(1, 2)], "policy": [group(1, 2)]}, "distributed"),
        ({"policy": [group(1, 3)]}, "mixed"),
    ],
)
def test_the_transport_is_chosen_by_where_the_policy_serves(
    groups: dict[str, Any], transport: str, fleet: Fleet
) -> None:
    flags = [*fleet(**groups), *BESIDE]
    assert parse_args(flags).update_weight_transport == transport
    for given in {"tensor", "mixed"} - {transport}:
        assert f"--update-weight-transport {given}" in refused([*flags, "--update-weight-transport", given])


@pytest.mark.parametrize(
    ("flags", "transport"),
    [
        (["--colocate"], "tensor"),
        (["--colocate", "--rollout-num-gpus", "2"], "tensor"),
        (["--colocate", "--ray-address", "10.0.0.1:6379"], "tensor"),
        (["--colocate", "--ray-address", "10.0.0.1:6379", "--rollout-num-gpus", "2"], "distributed"),
    ],
)
def test_on_a_cpu_an_engine_beside_colocated_ones_may_be_on_another_host_of_a_cluster(
    base: list[str], flags: list[str], transport: str
) -> None:
    assert parse_args([*base, "--device", "cpu", *flags]).update_weight_transport == transport


def layouts(args: Args) -> list[EngineLayout]:
    return [layout_of_group(args, m, g) for m in topology_of(args).models for g in m.groups if g.runs]


def test_a_model_with_dense_layers_that_engines_would_fill_with_experts_is_refused(
    base: list[str], tmp_path: Path
) -> None:
    config = SYNCED["Qwen3-30B-A3B"][0]
    (tmp_path / "config.json").write_text(json.dumps({**config, "mlp_only_layers": [3]}))
    words = [*base]
    words[words.index("--hf-checkpoint") + 1] = str(tmp_path)
    assert "layer 3 of this qwen3_moe is dense" in refused(words)
    assert parse_args([*words, "--debug-train-only"]).megatron["num_moe_experts"] == 128
