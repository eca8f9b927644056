"""Law: a public launch script parses and has a plan, or is refused for a reason that the docs name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime.cluster.placement import EngineDemand, Host, plan_placement
from slime.core.errors import ConfigError, HookError
from slime.settings import for_hook, parse_args
from slime.settings.command_line import explain_args as explain
from slime.settings.conditions import replaced_folders
from slime.settings.custom_yaml import for_functions_listed
from slime.settings.fields import declared, own_fields
from slime.settings.groups.launch_scripts import LaunchScriptSettings
from slime.settings.rules import likely_mistakes
from slime.settings.topology_yaml import topology_of
from tests.support.command_line import QWEN3, listed, refused
from tests.support.launch_scripts import launch_scripts, own_command_lines

DOCS = Path(__file__).parents[3] / "docs" / "migration.md"
REASONS = {
    "images": r"cannot be trained on images|--spec .* is a vision-language model|--multimodal-keys does not work with",
    "a draft for GLM-5": r"with speculative decoding: slime cannot train an MTP layer of glm_moe_dsa",
    "the engines' expert exchange": r"--sglang-moe-a2a-backend",
    "prefill and decode on shared GPUs": r"does not work with prefill and decode engines",
    "a router without a key": r"--sglang-router-ip needs --router-api-key",
    "engines that only encode images": r"worker_type encoder",
    "another draft": r"--sglang-speculative-\S+ .* does not work with speculative decoding: the draft",
    "routing replay with a draft": r"--use-rollout-routing-replay does not work with speculative decoding",
}
"""What docs/migration.md calls it -> the message."""
REFUSED = {
    "geo3k_vlm_run_geo3k_qwen35": {"images"},
    "glm5-744B-A40B": {
        "a draft for GLM-5",
        "the engines' expert exchange",
        "prefill and decode on shared GPUs",
    },
    "qwen3-235B-A22B": {"the engines' expert exchange"},
}
"""Script -> all the reasons for which it is refused; the others parse."""
REFUSED_LINES = {
    "qwen3_30B_A3B_fp8_deepep": {"the engines' expert exchange"},
    "geo3k_vlm_multi_turn": {"images"},
    "external_engines_with_a_router": {"a router without a key"},
    "epd": {"engines that only encode images"},
    "external_draft": {"another draft"},
    "ngram_draft": {"another draft"},
    "r3_with_a_draft": {"routing replay with a draft"},
}
"""The same of our own command lines."""
LINES = launch_scripts() | own_command_lines()


@pytest.fixture
def on_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a job on a Ray cluster with GPUs: `ray job submit` sets RAY_ADDRESS."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("slime.settings.groups.cluster.has_gpu", lambda: True)
    return tmp_path


def _gives_two_values(words: list[str]) -> bool:
    """Whether a flag of the model has two values, of which the last one counts."""
    values: dict[str, set[str]] = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            values.setdefault(word, set()).add(words[at + 1] if at + 1 < len(words) else "")
    return any(len(found) > 1 and not all(one.startswith("--") for one in found) for found in values.values())


@pytest.mark.parametrize("name", LINES)
def test_a_public_launch_script_as_it_is_has_a_plan_or_is_refused_for_its_reasons(
    name: str, on_a_cluster: Path
) -> None:
    script = LINES[name]
    words, reasons = script.write(on_a_cluster), (REFUSED | REFUSED_LINES).get(name)
    if reasons is not None:
        message = refused(words, synchronous=script.synchronous)
        problems = re.findall(r"^  \d+\. (.*)$", message, re.MULTILINE) or [message]
        found = [{reason for reason, pattern in REASONS.items() if re.search(pattern, text)} for text in problems]
        assert all(found) and set().union(*found) == reasons, message
        return
    args = parse_args(words, synchronous=script.synchronous)
    assert ("replaces" in listed(args)) == _gives_two_values(words)
    engines = [EngineDemand(one.num_gpus, one.runs) for one in topology_of(args).wanted()]
    engines = [] if args.debug_train_only else engines
    places = args.actor_num_nodes + -(-sum(e.num_slots for e in engines) // 8)
    plan = plan_placement(
        num_nodes=args.actor_num_nodes,
        num_per_node=args.actor_num_gpus_per_node,
        engines=engines,
        colocate=args.colocate,
        hosts=[Host(f"h{i}", f"10.0.0.{i}", 8, 8) for i in range(places)],
    )
    assert len(plan.engines) == sum(one.runs for one in engines)
    assert "Set, loaded and derived:" in explain(args)


def test_every_reason_for_which_a_script_is_refused_is_in_the_docs() -> None:
    assert set().union(*REFUSED.values(), *REFUSED_LINES.values()) == REASONS.keys() and len(REFUSED) <= 4
    text = DOCS.read_text()
    assert [reason for reason in REASONS if f"| {reason} |" not in text] == []


def test_scripts_are_parsed_without_torch_and_engines(tmp_path: Path) -> None:
    script = launch_scripts()["qwen3-4B"]
    code = (
        "import sys; from slime.settings import parse_args; parse_args(sys.argv[1:]);"
        "print([m for m in ('torch', 'ray', 'megatron', 'sglang', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, *script.write(tmp_path), "--device", "cuda", "--ray-address", "a:1"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "[]"


AGREES = [
    "--use-rotary-position-embeddings --no-position-embedding --train-backend megatron --check-weight-update-equal",
    "--spec slime_plugins.models.qwen3 get_spec --model-name qwen3",
    "--rollout-data-transport object-store --freeze-indexer --no-post-mlp-layernorm",
    "--wandb-key --use-wandb --wandb-group  --sglang-router-request-timeout-secs 14400",
]
CONTRADICTS = [
    ("--spec slime_plugins.models.glm4 get_glm_spec", "does not match the checkpoint's model_type qwen3"),
    ("--spec own.layers spec", "pass your own family with --model-family"),
    ("--model-name glm4", "whose model_type qwen3 determines how weights are converted"),
    ("--use-gated-attention", "the checkpoint's model contradicts --use-gated-attention"),
    ("--post-self-attn-layernorm --post-mlp-layernorm", "--post-self-attn-layernorm and --post-mlp-layernorm"),
    ("--use-rope-scaling", "contradicts --use-rope-scaling"),
    ("--distributed-backend nccl --device cpu", "use gloo"),
]


@pytest.mark.parametrize("flags", AGREES)
def test_a_flag_that_repeats_the_checkpoint_is_taken(base: list[str], flags: str) -> None:
    assert not parse_args([*base, *flags.split(), "--strict"]).idle


@pytest.mark.parametrize(("flags", "said"), CONTRADICTS)
def test_a_flag_that_contradicts_the_checkpoint_is_refused(base: list[str], flags: str, said: str) -> None:
    assert said in refused([*base, *flags.split()])


def test_layers_and_scalings_of_other_families_agree_with_theirs(base: list[str]) -> None:
    config = Path(base[1]) / "config.json"
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama = {**QWEN3, "model_type": "llama", "rope_scaling": {**scaling, "original_max_position_embeddings": 64}}
    config.write_text(json.dumps(llama))
    parse_args([*base, "--use-rope-scaling", "--strict"])
    config.write_text(json.dumps({**QWEN3, "model_type": "glm4", "tie_word_embeddings": False}))
    norms = ["--post-self-attn-layernorm", "--post-mlp-layernorm", "--spec", "slime_plugins.models.glm4", "get_spec"]
    parse_args([*base, *norms, "--strict"])


def test_every_flag_of_launch_scripts_agrees_or_is_checked_or_is_listed(base: list[str]) -> None:
    """Where a flag has neither a condition nor a rule, it says what is so in every run."""
    true_of_every_run = {
        *("train_backend", "use_rotary_position_embeddings", "no_position_embedding"),
        "freeze_indexer",
    }
    means_another = {"disable_rollout_global_dataset", "recompute_activations", "num_layers_per_virtual_pipeline_stage"}
    checked = {word.removeprefix("--").replace("-", "_") for flags, _ in CONTRADICTS for word in flags.split()}
    conditional = {f.name for f in own_fields(LaunchScriptSettings) if declared(f).conditions}
    assert {f.name for f in own_fields(LaunchScriptSettings)} <= (
        true_of_every_run | means_another | checked | conditional
    )


def test_flags_that_do_nothing_here_are_listed(base: list[str]) -> None:
    words = ["--rollout-data-transport", "nixl", "--release-train", "--ci-test", "--ci-disable-kl-checker"]
    words += ["--ci-save-grad-norm", "a", "--ci-load-grad-norm", "b"]
    args = parse_args([*base, *words])
    assert {f"--{name.replace('_', '-')}" for name in args.idle} == {w for w in words if w.startswith("--")}
    args = parse_args([*base, *words, "--ci-train-rollout-logprob-abs-diff-threshold", "0.3"])
    assert args.mismatch_limit == 0.3 and args.ci_test


def test_flags_that_are_other_names_mean_what_they_name(base: list[str], tmp_path: Path) -> None:
    assert parse_args([*base, "--recompute-activations"]).megatron["recompute_granularity"] == "selective"
    staged = [*base, "--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2"]
    args = parse_args([*staged, "--num-layers-per-virtual-pipeline-stage", "1"])
    assert args.megatron["virtual_pipeline_model_parallel_size"] == args.megatron["num_layers"] // 2
    words = ["--disable-rollout-global-dataset", "--rollout-function-path", "own.generate"]
    assert parse_args([*base, *words]).prompt_data is None
    assert "there are no prompts" in refused([*base, words[0]])


def test_nccl_means_what_the_gpus_allow(base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.settings.groups.cluster.has_gpu", lambda: True)
    words = [*base, "--update-weight-transport", "nccl", "--actor-num-gpus-per-node", "2"]
    assert parse_args([*words, "--colocate"]).update_weight_transport == "tensor"
    assert parse_args([*words, "--colocate", "--rollout-num-gpus", "4"]).update_weight_transport == "mixed"
    assert parse_args([*words, "--rollout-num-gpus", "2"]).update_weight_transport == "distributed"


def test_settings_of_the_other_loop_are_listed(base: list[str]) -> None:
    words = [*base, "--update-weights-interval", "2", "--keep-old-actor"]
    args = parse_args(words)
    assert (args.update_weights_interval, args.keep_old_actor) == (1, False)
    assert {"update_weights_interval", "keep_old_actor"} <= args.idle.keys()
    assert parse_args(words, synchronous=False).update_weights_interval == 2
    worker = [*base, "--fully-async", "--over-sampling-batch-size", "64"]
    assert "over_sampling_batch_size" in parse_args(worker, synchronous=False).idle


def test_a_clip_range_of_one_or_more_has_no_lower_bound(base: list[str]) -> None:
    args = parse_args([*base, "--advantage-estimator", "cispo", "--eps-clip", "10", "--eps-clip-high", "4"])
    assert (args.cispo_clip_low, args.cispo_clip_high) == (0.0, 5.0)
    assert parse_args([*base, "--eps-clip", "2"]).eps_clip == 2.0


def test_the_last_value_of_a_flag_of_the_model_counts(base: list[str]) -> None:
    words = [*base, "--moe-token-dispatcher-type", "allgather", "--moe-token-dispatcher-type", "alltoall"]
    args = parse_args(words)
    assert args.megatron["moe_token_dispatcher_type"] == "alltoall"
    assert "allgather, which a later --moe-token-dispatcher-type alltoall replaces" in listed(args)
    assert "allgather" in refused([*words, "--strict"])


def test_a_kl_that_only_measures_is_left_out_where_it_cannot_be_measured(base: list[str]) -> None:
    words = [*base, "--use-kl-loss", "--kl-loss-coef", "0.00", "--kl-loss-type", "k1", "--rollout-top-p", "0.9"]
    args = parse_args(words)
    assert (args.use_kl_loss, args.ref_load) == (False, None) and "use_kl_loss" in args.idle
    assert "--use-kl-loss does not work" in refused(
        [*words, "--override", "--kl-loss-coef", "1", "--kl-loss-type", "k3"]
    )


def test_a_served_teacher_at_another_temperature_is_a_warning(base: list[str]) -> None:
    words = ["--use-opd", "--opd-type", "sglang", "--opd-teacher-url", "http://a:1", "--rollout-temperature", "0.7"]
    assert "at temperature 1" in "".join(likely_mistakes(parse_args([*base, *words])))


def test_an_empty_key_of_wandb_is_the_login_of_this_machine(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for key in (["--wandb-key", ""], ["--wandb-key"]):
        args = parse_args([*base, *key, "--use-wandb"])
        assert (args.wandb_key, args.wandb_mode) == (None, "offline")
    assert parse_args([*base, "--use-wandb"]).wandb_mode is None
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x")
    assert parse_args([*base, "--use-wandb", "--wandb-key"]).wandb_mode is None


def test_explain_loads_hooks_as_the_start_does(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HookError, match="missing_module"):
        parse_args([*base, "--custom-rm-path", "missing_module.fn", "--explain"])
    assert capsys.readouterr().out == ""


def test_settings_of_a_rollout_plugin_reach_its_function(base: list[str]) -> None:
    words = ["--rollout-buffer-url", "http://a:1", "--rollout-task-type", "code"]
    assert "a --rollout-function-path of your own" in listed(parse_args([*base, *words]))
    args = parse_args([*base, *words, "--rollout-function-path", "own.generate", "--strict"])
    assert (args.rollout_buffer_url, args.rollout_task_type) == ("http://a:1", "code")


FREE = "use_rs: true\nrs_level: token\nrollout_temprature: 0.5\n"


def test_free_keys_of_the_yaml_are_the_users_where_a_function_may_read_them(base: list[str], tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(FREE)
    words = [*base, "--custom-config-path", str(path)]
    assert "has use_rs: True, which needs a user function that reads it" in refused(words)
    args = parse_args([*words, "--custom-generate-function-path", "own.generate"])
    assert (args.custom["rs_level"], args.to_json_dict()["custom"]["use_rs"]) == ("token", True)
    assert not args.idle and "custom.use_rs True; a similar setting is use_tis" in for_functions_listed(args)
    assert any("a similar setting is rollout_temperature" in text for text in for_functions_listed(args))
    assert parse_args([*words, "--custom-generate-function-path", "own.generate", "--strict"]).custom["use_rs"] is True


def test_settings_that_a_function_replaces_are_what_it_reads(base: list[str], tmp_path: Path) -> None:
    """Law: what only a user's function may read is listed apart, and the function gets its value."""
    path = tmp_path / "own.yaml"
    path.write_text("tis_mode: mask\nvalue_clip: 0.3\n")
    own = ["--use-tis", "--custom-tis-function-path", "own.tis", "--tis-level", "sequence", "--strict"]
    args = parse_args([*base, *own, "--custom-config-path", str(path), "--get-mismatch-metrics"])
    told = ("tis_mode mask", "value_clip 0.3", "tis_level sequence", "get_mismatch_metrics True")
    assert set(told) == set(for_functions_listed(args)) and not args.idle
    seen = for_hook(args)
    assert (seen.tis_level, seen.tis_mode, seen.value_clip) == ("sequence", "mask", 0.3)
    assert args.value_clip != 0.3 and "tis_level" in parse_args([*base, "--tis-level", "sequence"]).idle


def test_names_of_other_programs_are_no_free_keys(base: list[str], tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("learning_rate: 1e-5\n")
    words = [*base, "--custom-config-path", str(path), "--custom-generate-function-path", "own.generate"]
    assert "use --lr" in refused(words)


def test_balance_by_flops_is_how_samples_are_balanced(base: list[str]) -> None:
    assert parse_args([*base, "--balance-by-flops"]).balance_data


def test_the_length_of_an_evaluation_bounds_its_prompts(base: list[str]) -> None:
    words = ["--eval-interval", "1", "--eval-prompt-data", "a", base[3], "--eval-max-context-len", "64"]
    assert parse_args([*base, *words]).eval_max_prompt_len == 63


@pytest.mark.parametrize("flag", ["--ref-load", "--load"])
def test_the_trainer_starts_from_a_folder_in_hugging_face_format(base: list[str], tmp_path: Path, flag: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(QWEN3))
    args = parse_args([*base, flag, str(other), "--strict"])
    assert (args.initial_weights, args.load) == (str(other), None)
    assert args.ref_load == (str(other) if flag == "--ref-load" else None)
    (other / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": 3}))
    assert "use models with the same architecture" in refused([*base, flag, str(other)])


def test_load_goes_before_the_reference_which_then_needs_a_kl(base: list[str], tmp_path: Path) -> None:
    for name in ("start", "reference"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(QWEN3))
    words = [*base, "--load", str(tmp_path / "start"), "--ref-load", str(tmp_path / "reference")]
    assert "ref_load" in listed(parse_args(words))
    args = parse_args([*words, "--use-kl-loss", "--kl-loss-coef", "0.1"])
    assert (args.initial_weights, args.ref_load) == (str(tmp_path / "start"), str(tmp_path / "reference"))
    alone = parse_args([*words[:-2], "--use-kl-loss", "--kl-loss-coef", "0.1"])
    assert alone.ref_load == str(tmp_path / "start"), "the reference is what the policy starts from"


def _megatron(folder: Path, *, says: str = "release") -> Path:
    """A checkpoint of Megatron: converted from another format ("release"), or of a number of steps."""
    (folder / "release").mkdir(parents=True)
    (folder / "release" / "common.pt").write_bytes(b"")
    (folder / "latest_checkpointed_iteration.txt").write_text(says)
    return folder


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("flag", ["--ref-load", "--load"])
def test_instead_of_a_converted_folder_the_trainer_reads_what_it_was_converted_from(
    base: list[str], tmp_path: Path, flag: str, exists: bool
) -> None:
    converted = tmp_path / "other_torch_dist"
    if exists:
        _megatron(converted)
    words = [*base, flag, f"{converted}/", "--use-kl-loss", "--kl-loss-coef", "0.1"]
    args = parse_args(words)
    assert (args.initial_weights, args.load, args.ref_load) == (base[1], None, base[1]), "--hf-checkpoint stands in"
    (told,) = replaced_folders(args)
    assert told.startswith(f"{flag} {converted}") and told.endswith(f"the run reads {base[1]}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(QWEN3))
    args = parse_args(words)
    assert (args.initial_weights, args.load, args.ref_load) == (str(tmp_path / "other"), None, str(tmp_path / "other"))
    assert len(replaced_folders(args)) == 1


def test_a_teacher_is_never_the_student_in_its_place(base: list[str], tmp_path: Path) -> None:
    words = [*base, "--use-opd", "--opd-type", "megatron", "--opd-teacher-load", str(tmp_path / "other_torch_dist")]
    assert "is not a folder" in refused(words)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(QWEN3))
    assert parse_args(words).opd_teacher_load == str(tmp_path / "other")


@pytest.mark.parametrize("flag", ["--ref-load", "--load", "--critic-load"])
def test_what_megatron_trained_is_refused_with_what_to_give(base: list[str], tmp_path: Path, flag: str) -> None:
    folder = _megatron(tmp_path / "model_torch_dist", says="200")
    words = [*base, "--advantage-estimator", "ppo", flag, str(folder)]
    said = refused(words)
    assert "is a pickled Megatron checkpoint" in said
    assert f"slime convert {folder} OUT --hf-checkpoint MODEL --trust-pickle" in said
    assert "is a pickled Megatron checkpoint" in refused([*base, "--load", str(folder), "--save", str(folder)])
    assert "is not a folder" in refused([*base, "--ref-load", str(tmp_path / "misspelt")])


def test_records_have_the_ending_of_what_they_are(base: list[str], tmp_path: Path) -> None:
    words = [
        *("--save-debug-rollout-data", "a/{rollout_id}.pt", "--save-debug-train-data", "b/{rollout_id}.pt"),
    ]
    args = parse_args([*base, *words])
    assert (args.save_debug_rollout_data, args.save_debug_train_data) == (
        "a/{rollout_id}.jsonl.zst",
        "b/{rollout_id}.npz",
    )
    replay = parse_args([*base, "--load-debug-rollout-data", "a/{rollout_id}.pt"])
    assert replay.load_debug_rollout_data == args.save_debug_rollout_data
    pickled = tmp_path / "0.pt"
    pickled.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"could run code.*slime convert \S+/0\.pt \S+/0\.jsonl\.zst --trust-pickle"):
        parse_args([*base, "--load-debug-rollout-data", str(pickled)])
    template = ["--load-debug-rollout-data", str(tmp_path / "{rollout_id}.pt")]
    with pytest.raises(ConfigError, match=r"finds \S+/0\.pt, a pickle"):
        parse_args([*base, *template])
    (tmp_path / "0.jsonl.zst").touch()
    assert parse_args([*base, *template]).load_debug_rollout_data == str(tmp_path / "{rollout_id}.jsonl.zst")
