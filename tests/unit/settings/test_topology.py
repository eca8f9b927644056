"""Law: a topology is what the file says, and a file that cannot be meant is refused with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.cluster.hosts import plan_here
from slime.core.errors import ConfigError
from slime.core.topology import Topology, Worker
from slime.settings import parse_args
from slime.settings.topology_yaml import read_topology, topology_of


def read(tmp_path: Path, models: Any, *, trains: bool = True) -> Topology:
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump({"sglang": models}))
    return read_topology(str(file), hf_checkpoint="/m/policy", num_gpus_per_engine=2, trains=trains)


def group(num_gpus: int = 2, **more: Any) -> dict[str, Any]:
    return {"num_gpus": num_gpus, **more}


def test_models_and_groups_are_read_with_the_defaults_around_them(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        [
            {"name": "actor", "server_groups": [group(4), group(1, num_gpus_per_engine=1)]},
            {"name": "judge", "model_path": "/m/judge", "num_gpus_per_engine": 1, "engine_groups": [group(3)]},
            {
                "name": "ref",
                "update_weights": False,
                "server_groups": [
                    group(overrides={"chunked-prefill-size": 4096}),
                    group(),
                    group(3, worker_type="placeholder"),
                ],
            },
        ],
    )
    actor, judge, ref = found.models
    assert found.policy == actor and [m.trained for m in found.models] == [True, False, False]
    assert (judge.path, ref.path) == ("/m/judge", "/m/policy")
    assert [g.place.partition(": ")[2] for g in ref.groups][2] == "sglang[2] (ref).server_groups[2]"
    assert ref.groups[0].overrides == {"chunked_prefill_size": 4096}
    assert [w.num_gpus for w in found.wanted()] == [2, 2, 1, 1, 1, 1, 2, 2, 1, 1, 1]
    assert [w.runs for w in found.wanted()] == [True] * 8 + [False] * 3
    assert found.num_gpus == 4 + 1 + 3 + 2 + 2 + 3


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": ([], "no list of models under `sglang`"),
    "no name": ([{"server_groups": [group()]}], r"sglang\[0\] has no name"),
    "two of a name": ([{"name": "a", "server_groups": [group()]}] * 2, "two models are named 'a'"),
    "no policy": (
        [{"name": "a", "model_path": "/m/x", "server_groups": [group()]}],
        "update_weights is true for no model",
    ),
    "two policies": (
        [{"name": "a", "server_groups": [group()]}, {"name": "b", "server_groups": [group()]}],
        "update_weights is true for a, b, .* set `update_weights: false` for the frozen one",
    ),
    "training of another model": (
        [{"name": "a", "model_path": "/m/x", "update_weights": True, "server_groups": [group()]}],
        "the trainer has no weights for it",
    ),
    "no groups": ([{"name": "a"}], "has no server_groups"),
    "both spellings": ([{"name": "a", "server_groups": [group()], "engine_groups": [group()]}], "are synonyms"),
    "an unknown key": (
        [{"name": "a", "server_groups": [group(gpus=1)]}],
        r"server_groups\[0\] has the unknown key 'gpus'",
    ),
    "an unknown worker": ([{"name": "a", "server_groups": [group(worker_type="worker")]}], "choose from regular"),
    "an encoder": ([{"name": "a", "server_groups": [group(worker_type="encoder")]}], "use regular engines"),
    "prompts alone": ([{"name": "a", "server_groups": [group(worker_type="prefill")]}], r"\(a\) has no decode group"),
    "nobody who reads": ([{"name": "a", "server_groups": [group(worker_type="decode")]}], "has no prefill group"),
    "pairs beside whole ones": (
        [{"name": "a", "server_groups": [group(), group(worker_type="prefill"), group(worker_type="decode")]}],
        "mixes regular groups with prefill and decode groups",
    ),
    "a mode of its own": (
        [{"name": "a", "server_groups": [group(overrides={"disaggregation_mode": "decode"})]}],
        "use --prefill-num-servers, or worker_type",
    ),
    "nothing that runs": ([{"name": "a", "server_groups": [group(worker_type="placeholder")]}], "only placeholders"),
    "an uneven group": ([{"name": "a", "server_groups": [group(3)]}], "not a multiple of num_gpus_per_engine"),
    "a number as text": (
        [{"name": "a", "server_groups": [{"num_gpus": "2"}]}],
        "num_gpus is '2', but must be an integer",
    ),
    "an owned argument": (
        [{"name": "a", "server_groups": [group(overrides={"tp_size": 2})]}],
        "slime sets tp_size itself; use --rollout-num-gpus-per-engine",
    ),
    "an unknown argument": ([{"name": "a", "server_groups": [group(overrides={"warp": 2})]}], "SGLang has no setting"),
    "a key of its own": (
        [{"name": "a", "server_groups": [group(overrides={"api_key": "x"})]}],
        "one key for all engines; use --sglang-api-key",
    ),
    "a key to its weights": (
        [{"name": "a", "server_groups": [group(overrides={"admin_api_key": "x"})]}],
        "use --sglang-admin-api-key",
    ),
    "a dtype of its own": ([{"name": "a", "server_groups": [group(overrides={"dtype": "float16"})]}], "--sglang-dtype"),
    "a wrong type": ([{"name": "a", "server_groups": [group(overrides={"chunked_prefill_size": "x"})]}], "overrides"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_meant_is_refused_with_its_place(what: str, tmp_path: Path) -> None:
    models, said = WRONG[what]
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, models)


def test_without_a_trainer_nothing_has_to_be_the_policy(tmp_path: Path) -> None:
    found = read(tmp_path, [{"name": "a", "model_path": "/m/x", "server_groups": [group()]}], trains=False)
    assert found.policy is None and found.main == found.models[0]


def test_the_command_line_alone_is_one_model(base: list[str]) -> None:
    args = parse_args([*base, "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"])
    (model,) = topology_of(args).models
    assert (model.name, model.path, model.trained) == ("default", args.hf_checkpoint, True)
    assert [(g.num_gpus, g.num_gpus_per_engine, g.worker, g.place) for g in model.groups] == [
        (4, 2, Worker.REGULAR, "")
    ]
    assert topology_of(args.replace(debug_train_only=True)).models == ()


def evaluating(base: list[str], tmp_path: Path, *flags: str, synchronous: bool = True) -> Any:
    held = tmp_path / "held.jsonl"
    held.write_text('{"input": "1+1=", "label": "2"}\n')
    words = ["--eval-prompt-data", "held", str(held), "--eval-interval", "2", *flags]
    return parse_args([*base, *words], synchronous=synchronous)


def test_an_evaluation_fleet_stands_last_on_gpus_of_its_own(base: list[str], tmp_path: Path) -> None:
    """Law: it serves the policy in engines like the policy's own, and is no part of the rollout's GPUs."""
    args = evaluating(base, tmp_path, "--eval-fleet", "2", "--rollout-num-gpus-per-engine", "2")
    topology = topology_of(args)
    policy, fleet = topology.models
    assert (topology.policy, topology.main, topology.eval_fleet) == (policy, policy, fleet)
    assert fleet.trained and fleet.only_evaluates and fleet.path == policy.path
    assert [(g.num_gpus, g.num_gpus_per_engine, g.worker) for g in fleet.groups] == [(4, 2, Worker.REGULAR)]
    assert (topology.num_gpus, topology.num_eval_gpus, args.rollout_num_gpus) == (2, 4, 2)
    assert [wanted.model.name for wanted in topology.wanted()] == ["default", "eval_fleet", "eval_fleet"]
    assert plan_here(args).num_slots == 1 + 2 + 4
    file = tmp_path / "fleet.yaml"
    groups = [
        group(1, worker_type="placeholder"),
        group(4, num_gpus_per_engine=4, overrides={"max_running_requests": 3}),
    ]
    file.write_text(yaml.safe_dump({"sglang": [{"name": "a", "server_groups": groups}]}))
    found = topology_of(evaluating(base, tmp_path, "--eval-fleet", "1", "--sglang-config", str(file))).eval_fleet
    assert found is not None and found.groups[0].overrides == {"max_running_requests": 3}
    assert found.groups[0].num_gpus_per_engine == 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--colocate"], "eval_fleet 1 does not work with --colocate: it moves the trainer's weights off the GPU"),
        (["--rollout-external-engine-addrs", "10.0.0.1:3000"], "external engines, so it cannot reserve some"),
        (["--debug-rollout-only"], "no trainer sends weights to the fleet"),
        (["--num-rollout", "0"], "eval_fleet"),
        (
            ["--update-weight-transport", "disk", "--update-weight-local-checkpoint-dir", "/tmp/local"],
            "a host holds one version",
        ),
    ],
)
def test_where_an_evaluation_fleet_cannot_work_it_is_refused(
    base: list[str], tmp_path: Path, flags: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        evaluating(base, tmp_path, "--eval-fleet", "1", "--strict", *flags)


def test_a_model_may_not_have_the_name_of_the_evaluation_fleet(base: list[str], tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        yaml.safe_dump({"sglang": [{"name": "eval_fleet", "server_groups": [group(1, num_gpus_per_engine=1)]}]})
    )
    with pytest.raises(ConfigError, match="has a model named eval_fleet"):
        evaluating(base, tmp_path, "--eval-fleet", "1", "--sglang-config", str(file))


def test_the_file_gives_the_number_of_gpus(base: list[str], tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    groups = [group(2), group(3, worker_type="placeholder")]
    file.write_text(yaml.safe_dump({"sglang": [{"name": "a", "server_groups": groups}]}))
    flags = [*base, "--sglang-config", str(file)]
    args = parse_args(flags)
    assert args.rollout_num_gpus == 5 and args.origins["rollout_num_gpus"] == "derived: the groups of --sglang-config"
    with pytest.raises(ConfigError, match=r"rollout_num_gpus is 4, but the groups in \S+ have 5 GPUs"):
        parse_args([*flags, "--rollout-num-gpus", "4"])
    with pytest.raises(ConfigError, match="does not work with --sglang-config, whose worker_type"):
        parse_args([*flags, "--prefill-num-servers", "1"])


def test_a_model_that_is_not_there_is_refused(base: list[str], tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    judge = {
        "name": "judge",
        "model_path": str(tmp_path / "nothing"),
        "server_groups": [group(1, num_gpus_per_engine=1)],
    }
    file.write_text(yaml.safe_dump({"sglang": [{"name": "a", "server_groups": [group()]}, judge]}))
    with pytest.raises(ConfigError, match=r"nothing of model judge has no config.json; pass a Hugging Face folder"):
        parse_args([*base, "--sglang-config", str(file)])


def test_a_trailing_slash_makes_no_other_model(tmp_path: Path) -> None:
    (model,) = read(tmp_path, [{"name": "a", "model_path": "/m/policy/", "server_groups": [group()]}]).models
    assert (model.path, model.trained) == ("/m/policy", True)


def in_pairs(tmp_path: Path, **more: Any) -> list[str]:
    """Flags of a policy whose prompts are read by one engine, and sampled by two."""
    file = tmp_path / "pairs.yaml"
    kinds = {"prefill": 1, "decode": 2}
    groups = [group(num, num_gpus_per_engine=1, worker_type=kind, **more) for kind, num in kinds.items()]
    file.write_text(yaml.safe_dump({"sglang": [{"name": "a", "server_groups": groups}]}))
    return ["--sglang-config", str(file)]


def test_engines_work_in_pairs_by_file_or_flag(base: list[str], tmp_path: Path) -> None:
    """Law: the flag takes so many engines from all to read prompts, as a file says it with two groups."""
    flags = ["--rollout-num-gpus", "3", "--prefill-num-servers", "1"]
    for given in (in_pairs(tmp_path), flags):
        (model,) = topology_of(parse_args([*base, *given])).models
        assert model.in_pairs and [(g.worker, g.num_gpus) for g in model.groups] == [
            (Worker.PREFILL, 1),
            (Worker.DECODE, 2),
        ]
    assert not topology_of(parse_args(base)).models[0].in_pairs


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--prefill-num-servers", "1"],
            "--prefill-num-servers 1 leaves no engine for decode, because the run has 1 engine;",
        ),
        (["--rollout-num-gpus", "2", "--prefill-num-servers", "2"], "the run has 2 engines;"),
        (
            ["--prefill-num-servers", "1", "--rollout-external-engine-addrs", "127.0.0.1:1"],
            "does not start those",
        ),
        (["--sglang-disaggregation-mode", "prefill"], "use --prefill-num-servers, or worker_type"),
        (["--router-pd-disaggregation"], "use --prefill-num-servers, or worker_type"),
    ],
)
def test_pairs_that_cannot_be_meant_are_refused(base: list[str], flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_args([*base, *flags])


@pytest.mark.parametrize(
    ("flags", "overrides", "said"),
    [
        (["--fully-async", "--pause-generation-mode", "retract"], {}, "of old weights could reach"),
        (["--fully-async", "--pause-generation-mode", "in_place"], {}, "of old weights could reach"),
        (["--colocate", "--device", "cuda", "--actor-num-gpus-per-node", "3"], {}, "registered with the network"),
        (["--sglang-router-ip", "h", "--sglang-router-port", "1", "--router-api-key", "k"], {}, "to one engine"),
        ([], {"dp_size": 2}, "not tested"),
        ([], {"enable_return_routed_experts": True}, "routed experts stay"),
        ([], {"disaggregation_transfer_backend": "fake"}, "no KV cache would be transferred"),
    ],
)
def test_what_pairs_cannot_do_is_refused_before_they_start(
    base: list[str], tmp_path: Path, flags: list[str], overrides: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_args([*base, *in_pairs(tmp_path, overrides=overrides), *flags])


def test_a_judge_in_pairs_on_gpus_of_its_own_stands_beside_a_policy_that_lends(base: list[str], tmp_path: Path) -> None:
    """Law: a rule about memory that is lent asks those who lend any."""
    halves = [group(1, num_gpus_per_engine=1, worker_type=kind) for kind in ("prefill", "decode")]
    models = [
        {"name": "actor", "server_groups": [group(1, num_gpus_per_engine=1)]},
        {"name": "judge", "update_weights": False, "server_groups": halves},
    ]
    for order, accepted in ((models, True), (models[::-1], False)):
        file = tmp_path / "judged.yaml"
        file.write_text(yaml.safe_dump({"sglang": order}))
        flags = [*base, "--sglang-config", str(file), "--colocate", "--device", "cuda"]
        if accepted:
            assert parse_args(flags).offload_rollout
        else:  # the trainer's GPU is that of the first engine
            with pytest.raises(ConfigError, match="of model judge"):
                parse_args(flags)
