"""A setting that does not act on what the run computes is listed, and refused with --strict."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slime.settings import parse_args
from slime.settings.all_flags import components
from slime.settings.command_line import explain_args as explain
from slime.settings.fields import declared
from slime.settings.groups.algorithm import AlgorithmSettings, CriticSettings, OffPolicySettings, TeacherSettings
from tests.support.command_line import listed, refused
from tests.support.marks import quick

ALWAYS_ACT = {
    "loss_type": "it chooses what is minimised",
    "loss_aggregation": "every loss is summed with the weights that it gives; hooks are told of it",
    "calculate_per_token_loss": "a name of --loss-aggregation token_mean; another aggregation beside it is refused",
}
"""Settings without a condition, and why there is none."""

NO_ADVANTAGES = "--disable-compute-advantages-and-returns"
CUSTOM = "--loss-type custom_loss --custom-loss-function-path a.b"
HOOK = "--custom-advantage-function-path a.b"
TIS_HOOK = "--use-tis --custom-tis-function-path a.b"

CONTRADICTIONS = [
    # Without advantages the policy loss is zero.
    (NO_ADVANTAGES, "all advantages would be zero"),
    (f"{NO_ADVANTAGES} --use-kl-loss", "all advantages would be zero"),
    ("--disable-grpo-std-normalization --advantage-scale group", "contradicts advantage_scale"),
    ("--grpo-std-normalization --advantage-scale none", "contradicts advantage_scale"),
    ("--advantage-estimator maxrl --length-reward-coef 0.1", "rewards that are not negative"),
    ("--overlong-buffer-len 99999999", "larger than the maximum response length of"),
]

IDLE = [
    (f"{NO_ADVANTAGES} --entropy-coef 0.1 --kl-coef 0.1", "kl_coef 0.1, which needs advantages"),
    (f"{NO_ADVANTAGES} --use-kl-loss --kl-loss-coef 0.1 --use-opd --opd-type sglang", "use_opd True"),
    (f"{NO_ADVANTAGES} --entropy-coef 0.1 {HOOK}", "custom_advantage_function_path a.b"),
    (f"{NO_ADVANTAGES} --entropy-coef 0.1 --eps-clip 0.1", "eps_clip 0.1, which needs the policy loss"),
    (f"{NO_ADVANTAGES} {CUSTOM} --kl-coef 0.1", "kl_coef 0.1"),
    (f"{NO_ADVANTAGES} {CUSTOM} --advantage-estimator ppo", "advantage_estimator ppo"),
    # Other losses.
    ("--loss-type sft_loss --kl-coef 0.1", "kl_coef 0.1"),
    ("--loss-type sft_loss --entropy-coef 0.1", "entropy_coef 0.1"),
    ("--loss-type sft_loss --use-tis", "use_tis True"),
    ("--loss-type sft_loss --use-kl-loss", "use_kl_loss True"),
    ("--loss-type sft_loss --dynamic-sampling-filter-path a.b", "a rollout that samples"),
    ("--loss-type sft_loss --rollout-data-postprocess-path a.b", "which needs advantages"),
    (
        "--loss-type sft_loss --rollout-max-response-len 9",
        "rollout_max_response_len 9, which needs a rollout or an eval",
    ),
    ("--loss-type sft_loss --rollout-max-total-response-len 9", "rollout_max_total_response_len 9, which needs"),
    (
        "--loss-type sft_loss --rollout-temperature 0.5",
        "rollout_temperature 0.5, which needs a rollout or an evaluation",
    ),
    ("--loss-type sft_loss --rollout-top-p 0.5", "rollout_top_p 0.5, which needs"),
    ("--loss-type sft_loss --rollout-stop END", "rollout_stop ('END',), which needs"),
    ("--loss-type sft_loss --over-sampling-batch-size 8", "over_sampling_batch_size 8, which needs"),
    ("--loss-type sft_loss --advantage-estimator ppo", "advantage_estimator ppo"),
    ("--loss-type sft_loss --compute-advantages-and-returns", "compute_advantages_and_returns True"),
    (f"{CUSTOM} --use-tis", "use_tis True"),
    (f"{CUSTOM} --entropy-coef 0.1", "entropy_coef 0.1"),
    (f"{CUSTOM} --policy-loss gspo", "policy_loss gspo"),
    (f"{CUSTOM} --use-kl-loss --kl-loss-coef 0.1", "kl_loss_coef 0.1"),
    (f"{CUSTOM} --use-kl-loss --kl-loss-type k2", "kl_loss_type k2"),
    (f"{CUSTOM} --use-rollout-logprobs", "use_rollout_logprobs True"),
    (f"{CUSTOM} --get-mismatch-metrics", "get_mismatch_metrics True"),
    # Corrections.
    ("--rejection-veto 0.1", "which needs off_policy_corrections rejection (--rejection-level)"),
    ("--rejection-low 0.1", "which needs off_policy_corrections rejection (--rejection-level)"),
    ("--rejection-high 3", "which needs off_policy_corrections rejection (--rejection-level)"),
    ("--tis-clip 3", "or tis_metrics (--get-mismatch-metrics)"),
    ("--tis-clip-low 0.1", "or tis_metrics (--get-mismatch-metrics)"),
    ("--tis-mode mask", "or tis_metrics (--get-mismatch-metrics)"),
    ("--tis-level sequence", "or tis_metrics (--get-mismatch-metrics)"),
    ("--custom-tis-function-path a.b", "which needs --use-tis"),
    ("--opsm-delta 0.1", "which needs off_policy_corrections opsm (--use-opsm)"),
    # Bounds.
    ("--policy-loss sapo --eps-clip 0.1", "eps_clip 0.1"),
    ("--advantage-estimator sapo --eps-clip-high 0.1", "eps_clip_high 0.1"),
    ("--policy-loss sapo --eps-clip-c 3", "which needs policy_loss gspo or ppo_clip"),
    ("--policy-loss cispo --eps-clip-high 4 --cispo-clip-high 2", "its own bounds"),
    ("--policy-loss cispo --eps-clip 0.1 --cispo-clip-low 0 --cispo-clip-high 2", "its own bounds"),
    ("--policy-loss cispo --eps-clip 0.1 --eps-clip-high 4 --cispo-clip-low 0", "eps_clip 0.1"),
    ("--cispo-clip-low 0", "which needs policy_loss cispo"),
    ("--sapo-tau-positive 2", "which needs policy_loss sapo"),
    ("--dppo-divergence-threshold 0.1", "which needs policy_loss dppo"),
    ("--policy-loss dppo --eps-clip 0.1", "eps_clip 0.1"),
    # Advantages.
    *(
        (f"--advantage-estimator {e} --disable-grpo-std-normalization", "grpo_std_normalization False")
        for e in ("rloo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    ),
    *(
        (f"--advantage-estimator {e} --disable-rewards-normalization", "rewards_normalization False")
        for e in ("ppo", "reinforce_plus_plus")
    ),
    ("--disable-rewards-normalization --advantage-scale batch", "advantage_scale batch"),
    ("--disable-rewards-normalization --advantage-epsilon 1e-4", "advantage_epsilon 0.0001"),
    ("--advantage-scale none --advantage-epsilon 1e-4", "which needs advantage_scale group or batch"),
    (f"{HOOK} --advantage-estimator ppo --lambd 0.9", "--custom-advantage-function-path replaces it"),
    (f"{HOOK} --advantage-estimator ppo --gamma 0.9", "--custom-advantage-function-path replaces it"),
    ("--value-clip 0.1", "which needs advantage_estimator ppo"),
    ("--opd-kl-coef 0.5", "which needs --use-opd"),
    # Reference and aggregation.
    ("--kl-loss-type k2", "which needs --kl-coef, or --use-kl-loss"),
    ("--use-unbiased-kl", "which needs --use-kl-loss"),
    ("--ref-update-interval 2", "which needs --use-kl-loss or --kl-coef"),
    ("--lora-alpha 8", "which needs --lora-rank"),
    ("--lora-target-modules linear_qkv", "which needs --lora-rank"),
    ("--keep-old-actor --use-rollout-logprobs", "which needs old log-probs of the trainer"),
    ("--keep-old-actor --debug-train-only", "which needs engines"),
    # What acts only on something that does not act itself.
    ("--loss-type sft_loss --use-kl-loss --ref-update-interval 2", "ref_update_interval 2"),
    ("--loss-type sft_loss --use-kl-loss --kl-loss-type k2", "kl_loss_type k2"),
    (f"{NO_ADVANTAGES} --entropy-coef 0.1 --use-opd --opd-type sglang --opd-teacher-url http://a:1", "opd_teacher_url"),
    # Evaluation, trackers, the reward service.
    ("--eval-prompt-data aime DATA", "which needs evaluation: --eval-interval"),
    ("--eval-config HELD_OUT", "which needs evaluation: --eval-interval"),
    ("--eval-temperature 0.5", "eval_temperature 0.5, which needs evaluation: --eval-interval"),
    ("--eval-max-response-len 9", "eval_max_response_len 9, which needs evaluation"),
    ("--eval-reward-key a", "eval_reward_key a, which needs evaluation"),
    ("--n-samples-per-eval-prompt 4", "n_samples_per_eval_prompt 4, which needs evaluation"),
    ("--skip-eval-before-train", "skip_eval_before_train True, which needs --eval-interval"),
    ("--wandb-project a", "wandb_project a, which needs --use-wandb"),
    ("--disable-wandb-random-suffix", "wandb_random_suffix False, which needs --use-wandb"),
    ("--tb-project-name a", "tb_project_name a, which needs --use-tensorboard"),
    ("--rm-url http://a:1", "rm_url http://a:1, which needs --rm-type remote_rm"),
    ("--overlong-penalty-factor 2", "overlong_penalty_factor 2.0, which needs --overlong-buffer-len"),
    ("--custom-reward-post-process-path a.b --length-reward-coef 0.1", "which needs slime's own rewards"),
    ("--rm-url http://a:1 --rm-batch-size 4", "rm_batch_size 4, which needs --rm-type remote_rm"),
    ("--loss-constant-length 9", "which needs loss_aggregation constant_length"),
    ("--calculate-per-token-loss --drop-masked-executions", "which token_mean does not"),
]

ACTING = [
    f"{NO_ADVANTAGES} --use-kl-loss --kl-loss-coef 0.1",
    f"{NO_ADVANTAGES} --use-kl-loss --kl-loss-coef 0.1 --use-unbiased-kl --use-rollout-logprobs",
    f"{NO_ADVANTAGES} --entropy-coef 0.1",
    f"{NO_ADVANTAGES} --debug-rollout-only",
    f"{NO_ADVANTAGES} --loss-type sft_loss --calculate-per-token-loss --debug-train-only",
    "--loss-type sft_loss --kl-coef 0.0 --entropy-coef 0 --no-use-tis --drop-masked-executions",
    "--loss-type sft_loss --loss-aggregation constant_length --rollout-max-response-len 9",
    "--loss-type sft_loss --eval-interval 1 --eval-prompt-data DATA --rm-type math --rollout-max-response-len 9",
    f"{CUSTOM} {NO_ADVANTAGES} --use-kl-loss",
    f"{CUSTOM} --use-kl-loss --ref-load MODEL",
    "--eval-function-path a.b --eval-interval 1 --eval-temperature 0.5 --skip-eval-before-train",
    "--use-wandb --wandb-project a --disable-wandb-random-suffix --use-tensorboard --tb-project-name a",
    "--rm-type remote_rm --rm-url http://a:1 --rm-batch-size 4",
    "--rm-type boxed_remote_rm --rm-url http://a:1",
    "--custom-rm-path a.b --rm-url http://a:1",
    f"{CUSTOM} --kl-coef 0.1 --kl-loss-type k2 --log-ratio-limit 9 --use-opd --opd-type sglang {HOOK}",
    f"{CUSTOM} --advantage-estimator ppo --gamma 0.9 --value-clip 0.1 --drop-masked-executions",
    f"{HOOK} --advantage-estimator ppo --critic-lr 1e-4 --normalize-advantages --kl-coef 0.1",
    "--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4.0",
    "--policy-loss cispo --eps-clip 0.1 --cispo-clip-high 2",
    "--policy-loss cispo --eps-clip 0.3 --cispo-clip-low 0",
    "--policy-loss cispo --cispo-clip-low 0 --cispo-clip-high 1.28",
    "--policy-loss gspo --eps-clip 3e-4 --eps-clip-high 4e-4",
    "--use-kl-loss --kl-loss-coef 0.0 --kl-loss-type low_var_kl --entropy-coef 0.0 --eps-clip 0.2 --eps-clip-high 0.28",
    "--kl-coef 0.1 --kl-loss-type k1 --ref-load MODEL",
    "--get-mismatch-metrics --tis-clip 3 --tis-level sequence",
    "--use-tis --get-mismatch-metrics --tis-mode mask --rejection-level geometric --rejection-veto 1e-4",
    TIS_HOOK,
    "--disable-grpo-std-normalization --advantage-scale none --loss-aggregation constant_length",
    "--disable-grpo-std-normalization --loss-aggregation constant_length --loss-constant-length 9",
    "--disable-rewards-normalization --n-samples-per-prompt 1",
    "--advantage-estimator reinforce_plus_plus --gamma 0.9 --observation-returns reset",
    "--advantage-estimator ppo --lambd 0.9 --num-critic-only-steps 1 --value-clip 0.1",
    "--advantage-estimator grpo --num-critic-only-steps 0 --eps-clip-c none",
]

OUT_OF_RANGE = [
    *(
        f"{flag} {value}"
        for flag in (
            "--entropy-coef",
            "--kl-coef",
            "--use-kl-loss --kl-loss-coef",
            "--use-opd --opd-type sglang --opd-kl-coef",
            "--rejection-level token --rejection-veto",
            "--log-ratio-limit",
            "--advantage-epsilon",
            "--use-opsm --opsm-delta",
            "--policy-loss sapo --sapo-tau-negative",
            "--advantage-estimator ppo --critic-lr",
            "--advantage-estimator ppo --value-clip",
            "--advantage-estimator ppo --gamma",
            "--eps-clip",
            "--eps-clip-high",
            "--eps-clip-c",
            "--use-tis --tis-clip",
            "--rejection-level token --rejection-high",
            "--policy-loss cispo --cispo-clip-high",
        )
        for value in ("nan", "-1")
    ),
    "--entropy-coef inf",
    "--eps-clip 0",
]


@pytest.mark.parametrize(("flags", "said"), CONTRADICTIONS)
def test_a_run_that_would_learn_nothing_is_refused(base: list[str], flags: str, said: str) -> None:
    assert said in refused([*base, *flags.split()])


@pytest.mark.parametrize(("flags", "said"), quick(IDLE, *IDLE[::3]))
def test_a_setting_that_does_nothing_is_listed_and_refused_with_strict(base: list[str], flags: str, said: str) -> None:
    held_out = Path(base[3]).with_name("held_out.yaml")
    held_out.write_text(f"eval: {{datasets: [{{name: a, path: {base[3]}}}]}}")
    words = [*base, *flags.replace("DATA", base[3]).replace("HELD_OUT", str(held_out)).split()]
    loop = "--keep-old-actor" not in words
    assert said in listed(parse_args(words, synchronous=loop))
    assert said in refused([*words, "--strict"], synchronous=loop)


@pytest.mark.parametrize("flags", ACTING)
def test_a_setting_that_acts_is_taken(base: list[str], flags: str) -> None:
    flags = flags.replace("MODEL", base[1]).replace("DATA", base[base.index("--prompt-data") + 1])
    assert not parse_args([*base, *flags.split(), "--strict"]).idle


@pytest.mark.parametrize("flags", OUT_OF_RANGE)
def test_a_coefficient_is_a_number_that_makes_sense(base: list[str], flags: str) -> None:
    message = refused([*base, *flags.split()])
    name, value = flags.split()[-2:]
    assert f"{name} is {float(value)}, " in message


def test_no_setting_of_the_algorithm_is_forgotten() -> None:
    groups = (AlgorithmSettings, OffPolicySettings, TeacherSettings, CriticSettings)
    free = {f.name for group in groups for f in dataclasses.fields(group) if not declared(f).needs}
    assert free == ALWAYS_ACT.keys(), "declare what a new setting needs, or say here why it always acts"
    entries = set(components().of_entries())
    assert not entries & ALWAYS_ACT.keys(), "a setting of an entry acts where the entry is chosen"


def test_what_has_no_effect_is_told_once_with_the_flag_that_was_given(base: list[str]) -> None:
    args = parse_args([*base, "--tis-clip", "3", "--lora-alpha", "8"])
    assert dict(args.idle) == {
        "tis_clip": "3.0, which needs off_policy_corrections tis (--use-tis without --custom-tis-function-path) "
        "or tis_metrics (--get-mismatch-metrics)",
        "lora_alpha": "8.0, which needs --lora-rank",
    }
    text = explain(args)
    assert text.index("tis_clip 3.0, which needs") < text.index("Set, loaded and derived:")
    assert args.to_json_dict()["idle"] == dict(args.idle)


def test_the_scale_of_adapters_is_shown_as_it_is_used(base: list[str]) -> None:
    args = parse_args([*base, "--lora-rank", "4", "--lr", "1e-4"])
    assert args.lora_alpha == 8.0 and "lora_alpha = 8.0    (derived: 2 x lora_rank)" in explain(args)
    assert parse_args(base).lora_alpha is None


def test_what_has_no_effect_is_as_if_it_had_not_been_given(base: list[str]) -> None:
    plain, words = (
        parse_args(base),
        "--offload-train --opd-teacher-load missing --critic-load missing --tis-clip 9 --seq-length 9",
    )
    args = parse_args([*base, *words.split()])
    assert len(args.idle) == 5
    assert args.replace(run_id=plain.run_id) == plain


def test_what_has_no_effect_is_not_looked_for(base: list[str]) -> None:
    """But for held-out data: whoever names them without an interval has most likely forgotten the interval."""
    assert "does not exist" in refused([*base, "--eval-config", "missing"])
    assert "critic_load" in parse_args([*base, "--critic-load", "missing"]).idle
