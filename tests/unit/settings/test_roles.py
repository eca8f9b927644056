"""Settings of one role: read as flags are, resolved and checked for it, shown, and of that role alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.settings import Args, parse_args
from slime.settings.command_line import explain_args as explain
from slime.settings.roles import MAY_DIFFER, critic_args
from slime.settings.schema import flags_of_owner
from tests.support.command_line import listed, refused


@pytest.fixture
def ppo(base: list[str]) -> list[str]:
    """A command line with a critic."""
    return [*base, "--advantage-estimator", "ppo", "--lr", "2e-6", "--lr-decay-style", "cosine"]


def with_roles(words: list[str], **overrides: Any) -> list[str]:
    """`words` and a file with an entry for each role."""
    path = Path(words[1]).parent / "roles.yaml"
    entries = [{"name": f"the {role}", "role": role, "overrides": own} for role, own in overrides.items()]
    path.write_text(json.dumps({"megatron": entries}))
    return [*words, "--megatron-config-path", str(path)]


def parsed(words: list[str], **overrides: Any) -> Args:
    return parse_args([*with_roles(words, **overrides), "--strict"])


def test_without_a_file_the_critic_has_the_settings_of_the_policy(ppo: list[str]) -> None:
    args = parse_args(ppo)
    assert dict(args.critic) == {} and critic_args(args).megatron == args.megatron


def test_what_a_role_overrides_is_of_that_role_alone(ppo: list[str]) -> None:
    args = parsed(ppo, critic={"lr": "1e-5", "lr_warmup_iters": 2, "clip_grad": 0.5}, actor={"weight_decay": 0.3})
    critic = critic_args(args)
    assert (args.lr, args.lr_warmup_iters, args.clip_grad) == (2e-6, 0, 1.0)
    assert (critic.lr, critic.lr_warmup_iters, critic.clip_grad) == (1e-5, 2, 0.5)
    assert (args.weight_decay, args.start_weight_decay) == (0.3, 0.3), "derivations follow"
    assert (critic.weight_decay, critic.start_weight_decay) == (0.01, 0.01)


def test_it_goes_before_the_command_line_and_is_shown_with_its_origin(ppo: list[str]) -> None:
    words = [*ppo, "--recompute-granularity", "selective"]
    args = parsed(words, actor={"lr": 3e-6}, critic={"recompute_granularity": "full", "recompute_method": "uniform"})
    assert (args.lr, args.critic_lr, args.recompute_granularity) == (3e-6, 2e-6, "selective")
    text = explain(args)
    assert "critic.recompute_granularity = full    (" in text and "roles.yaml, role critic)" in text
    assert "megatron.lr = 3e-06    (" in text and "roles.yaml, role actor)" in text


def test_the_critic_s_start_and_rate_are_those_of_the_flags(ppo: list[str]) -> None:
    start = ppo[1]
    args = parsed(ppo, critic={"load": start, "lr": 5e-6})
    assert (args.critic_load, args.critic_lr) == (start, 5e-6)
    twice = refused([*with_roles(ppo, critic={"lr": 5e-6}), "--critic-lr", "1e-6"])
    assert "set it in only one place" in twice


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lr_warmup_iter": 2}, "is not a setting; did you mean lr_warmup_iters?"),
    ({"tensor_model_parallel_size": 2}, "both roles share the parallel layout"),
    ({"context_parallel_size": 2}, "both roles share the parallel layout"),
    ({"rollout_batch_size": 3}, "the run has a different value, and both roles share this setting"),
    ({"sequence_parallel": 0}, "is 0, but must be true or false"),
    ({"bf16": False}, "roles share this setting"),
    ({"clip_grad": "much"}, "clip_grad"),
    ({"adam_beta2": 2.0}, "but must be at least 0 and < 1"),
    ({"weight_decay": -1}, "is -1.0, but must be at least 0"),
    ({"optimizer_cpu_offload": "yes"}, "is 'yes', but must be true or false"),
]


@pytest.mark.parametrize(("own", "said"), REFUSED)
def test_what_a_role_cannot_have_is_refused_by_name(ppo: list[str], own: dict[str, Any], said: str) -> None:
    message = refused(with_roles(ppo, critic=own))
    assert said in message and next(iter(own)) in message


def test_a_role_may_say_again_what_the_run_has(ppo: list[str]) -> None:
    again = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "optimizer": "adam", "bf16": True}
    said = parsed(ppo, actor={**again, "rollout_batch_size": 4}, critic=again)
    assert dict(said.critic) == {} and not said.idle
    assert "the run has a different value" in refused(with_roles(ppo, actor={"optimizer": "sgd"}))


def test_where_a_critic_would_be_saved_is_listed(ppo: list[str]) -> None:
    assert "critic.save x, which needs separate checkpoints" in listed(
        parse_args(with_roles(ppo, critic={"save": "x"}))
    )


def test_each_role_s_schedule_is_held_to_its_own_rate(ppo: list[str]) -> None:
    """The policy's rate is 2e-6."""
    critic = critic_args(parsed(ppo, critic={"lr": 1e-5, "min_lr": 5e-6}))
    assert (critic.lr, critic.min_lr) == (1e-5, 5e-6)
    critic = critic_args(parsed(ppo, critic={"lr": 1e-5, "lr_warmup_init": 5e-6, "lr_warmup_iters": 1}))
    assert (critic.lr, critic.lr_warmup_init) == (1e-5, 5e-6)
    assert "min_lr 1e-06 is above lr 1e-07" in refused(with_roles(ppo, critic={"lr": 1e-7, "min_lr": 1e-6}))
    warms = {"lr": 1e-7, "lr_warmup_init": 1e-6, "lr_warmup_iters": 1}
    assert "lr_warmup_init 1e-06 is above lr 1e-07" in refused(with_roles(ppo, critic=warms))
    assert "role actor: lr_warmup_init" in refused(with_roles(ppo, actor=warms))


def test_a_floor_in_common_is_lowered_to_the_critic_s_rate(ppo: list[str]) -> None:
    words = [*ppo, "--min-lr", "1e-6", "--critic-lr", "5e-7"]
    for args in (parse_args(words), parsed(words, critic={"clip_grad": 0.5})):
        assert (args.min_lr, critic_args(args).lr, critic_args(args).min_lr) == (1e-6, 5e-7, 5e-7)


def test_a_warm_up_in_common_begins_below_both_rates(ppo: list[str]) -> None:
    words = [*ppo, "--lr-warmup-iters", "1", "--lr-warmup-init", "5e-7"]
    assert parse_args(words).lr_warmup_init == 5e-7
    assert "above critic_lr 1e-08" in refused([*words, "--critic-lr", "1e-8"])
    assert "role critic: lr_warmup_init 5e-07 is above lr 1e-08" in refused(with_roles(words, critic={"lr": 1e-8}))
    own = parsed(words, critic={"lr": 1e-8, "lr_warmup_init": 1e-9})
    assert critic_args(own).lr_warmup_init == 1e-9


FILES = [
    ("megatron: {}", "must have only the key megatron, with a list"),
    ("sglang: []", "has the keys ['sglang'], but must have only the key megatron, with a list"),
    ("megatron: [{role: ref}]", "has the role 'ref'; set role to actor or critic"),
    ("megatron: [{role: critic, lr: 1}]", "has the unknown keys lr; choose from name, role, overrides, args"),
    ("megatron: [{role: critic}, {role: critic}]", "a second entry for role critic"),
    ("megatron: [{role: critic, args: {lr: 1}, overrides: {lr: 1}}]", "write overrides as one mapping"),
]


@pytest.mark.parametrize(("text", "said"), FILES)
def test_a_file_of_another_form_is_refused(ppo: list[str], tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "roles.yaml").write_text(text)
    assert said in refused([*ppo, "--megatron-config-path", str(tmp_path / "roles.yaml")])


def test_what_does_not_act_for_its_role_is_listed(base: list[str], ppo: list[str]) -> None:
    places = {"num_nodes": 1, "num_gpus_per_node": 8}
    told = listed(parse_args(with_roles(base, critic={"lr": 1e-5}, actor=places)))
    assert "critic.lr 1e-05, which needs an advantage_estimator with a critic" in told
    assert "actor.num_nodes 1, which needs separate ranks" in told
    idle = {"lr_decay_style": "constant", "min_lr": 1e-7}
    assert "critic.min_lr 1e-07, which needs learning-rate decay" in listed(parse_args(with_roles(ppo, critic=idle)))
    assert "min_lr 1e-07" in refused([*with_roles(ppo, critic=idle), "--strict"])


def test_what_may_differ_are_settings_of_megatron() -> None:
    assert set(MAY_DIFFER) <= {flag.dest for flag in flags_of_owner("megatron")}
