"""Law: the table of placements and transports in docs/weight_sync.md is what the settings accept and refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from slime.cluster.hosts import require_reach
from slime.cluster.placement import EngineDemand, Host, plan_placement
from slime.core.errors import ConfigError
from slime.settings import parse_args
from slime.settings.args import Args
from tests.support.placements import PLACEMENTS, documented_pairs

PAIRS = documented_pairs()


def test_the_table_has_every_placement_and_transport() -> None:
    assert {placement for placement, _ in PAIRS} == PLACEMENTS.keys()
    assert {transport for _, transport in PAIRS} == {"tensor", "distributed", "disk", "mixed"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("placement", "transport"), PAIRS)
def test_a_pair_is_accepted_or_refused_as_written(placement: str, transport: str, device: str, base: list[str]) -> None:
    command = [*base, "--device", device, *PLACEMENTS[placement], "--update-weight-transport", transport]
    if device in PAIRS[placement, transport]:
        assert accepted(command).update_weight_transport == transport
    else:
        with pytest.raises(ConfigError, match=f"--update-weight-transport {transport}|--rollout-external"):
            accepted(command)


def test_an_engine_that_reaches_to_another_host_has_no_shared_memory_there(base: list[str]) -> None:
    """Law: all ranks of an engine count, not the first one."""
    settings = ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--update-weight-transport", "tensor"]
    args = parse_args([*base, "--ray-address", "10.0.0.1:1", "--colocate", "--actor-num-nodes", "2", *settings])
    hosts = [Host(name, f"10.0.0.{i}", num_slots=1, num_cores=1) for i, name in enumerate("ab", start=1)]
    plan = plan_placement(num_nodes=2, num_per_node=1, engines=[EngineDemand(2)], colocate=True, hosts=hosts)
    with pytest.raises(ConfigError, match=r"cannot reach engines \[0\]"):
        require_reach(args, plan)


JOINED = ["--device", "cuda", "--ray-address", "10.0.0.1:6379", "--actor-num-nodes", "2"]


@pytest.mark.parametrize("size", ["1", "2", "4"])
def test_a_colocated_engine_may_span_whole_hosts(size: str, base: list[str]) -> None:
    """Law: on GPUs, each rank of such an engine maps the memory of the training rank on its own GPU."""
    more = ["--actor-num-gpus-per-node", "2", "--num-gpus-per-node", "2", "--rollout-num-gpus-per-engine", size]
    args = parse_args([*base, *JOINED, "--colocate", *more])
    assert args.update_weight_transport == "tensor" and args.rollout_num_gpus == 4


def test_a_plan_without_places_is_refused_before_there_are_hosts(base: list[str]) -> None:
    """Law: what no cluster could place is refused by the settings, so `--explain` refuses it, too."""
    command = [*base, *JOINED, "--actor-num-gpus-per-node", "3"]
    with pytest.raises(ConfigError, match="cannot place 3 engines of 2 slots on 2 hosts with 3 training slots each"):
        parse_args([*command, "--colocate", "--rollout-num-gpus-per-engine", "2"])
    with pytest.raises(ConfigError, match="actor_num_gpus_per_node 3 is above num_gpus_per_node 2"):
        parse_args([*command, "--num-gpus-per-node", "2"])


def test_a_frozen_judge_may_be_where_no_memory_is_shared(base: list[str], tmp_path: Path) -> None:
    """Law: only who gets weights has to see the memory that they come through."""
    models = [{"name": name, "server_groups": [{"num_gpus": 1, "num_gpus_per_engine": 1}]} for name in ("a", "judge")]
    file = tmp_path / "judged.yaml"
    file.write_text(yaml.safe_dump({"sglang": [models[0], {**models[1], "update_weights": False}]}))
    flags = ["--sglang-config", str(file), "--update-weight-transport", "tensor", "--ray-address", "10.0.0.1:1"]
    args = parse_args([*base, *flags, "--colocate"])
    hosts = [Host(name, f"10.0.0.{i}", num_slots=1, num_cores=1) for i, name in enumerate("ab", start=1)]
    engines = [EngineDemand(1), EngineDemand(1)]
    plan = plan_placement(num_nodes=1, num_per_node=1, engines=engines, colocate=True, hosts=hosts)
    assert [plan.slot_hosts[engine.slots[0]] for engine in plan.engines] == [0, 1]
    require_reach(args, plan)


def accepted(command: list[str]) -> Args:
    """What comes of a command line, and of a plan over hosts of one slot where it asks for several."""
    args = parse_args(command)
    if args.ray_address is not None:
        hosts = [Host(name, f"10.0.0.{i}", num_slots=1, num_cores=1) for i, name in enumerate("ab", start=1)]
        require_reach(
            args,
            plan_placement(
                num_nodes=args.actor_num_nodes,
                num_per_node=1,
                engines=[EngineDemand(1)] * args.rollout_num_gpus,
                colocate=args.colocate,
                hosts=hosts,
            ),
        )
    return args
