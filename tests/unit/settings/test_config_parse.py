"""Laws of the command line: what is asked for is what runs; everything else is refused at once, with a way out."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.settings import parse_args
from slime.settings.command_line import explain_args as explain
from slime.settings.command_line import help_text
from slime.settings.conditions import replaced_folders
from tests.support.command_line import QWEN3, listed, refused


def test_a_complete_command_line_is_resolved(base: list[str]) -> None:
    args = parse_args([*base, "--device", "cpu"])
    assert (args.global_batch_size, args.num_steps_per_rollout, args.over_sampling_batch_size) == (8, 1, 4)
    assert args.megatron["train_iters"] == args.megatron["lr_decay_iters"] == 3
    assert args.sglang["dtype"] == args.megatron["params_dtype"] == "bfloat16"
    assert (args.rollout_num_gpus, args.update_weight_transport) == (1, "tensor")
    assert args.eval_temperature == args.rollout_temperature and args.eps_clip_high == args.eps_clip
    assert args.lr == args.megatron["lr"] == 1e-6


def test_the_shape_is_the_checkpoints(base: list[str]) -> None:
    m = parse_args(base).megatron
    assert (m["num_layers"], m["hidden_size"], m["kv_channels"], m["num_query_groups"]) == (2, 64, 32, 2)
    assert m["rotary_base"] == 1e6 and m["qk_layernorm"] and not m["untie_embeddings_and_output_weights"]
    assert parse_args([*base, "--num-layers", "2", "--swiglu", "--disable-bias-linear"]).megatron == m


def test_a_flag_that_contradicts_the_checkpoint_is_refused_with_both_values(base: list[str]) -> None:
    message = refused([*base, "--num-layers", "3"])
    assert "num-layers 3" in message and "which has 2" in message


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("--rollout-batch-sise", "--rollout-batch-size"),
        ("--tensor-model-paralel-size", "--tensor-model-parallel-size"),
        ("--sglang-mem-fraction-statics", "--sglang-mem-fraction-static"),
        ("--router-polcy", "--router-policy"),
    ],
)
def test_an_unknown_flag_names_the_nearest(base: list[str], typo: str, meant: str) -> None:
    assert meant in refused([*base, typo, "4"])


def test_prefixes_are_no_abbreviations(base: list[str]) -> None:
    assert "--rollout-batch-size" in refused([*base, "--rollout-batch", "4"])


def test_a_typo_is_answered_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys\nfrom slime.settings import main_args\n"
        "try:\n    main_args(['--rollout-batch-sise', '4'])\n"
        "except SystemExit as e:\n    assert e.code == 2, e.code\n"
        "heavy = {'torch', 'transformers', 'ray', 'megatron', 'sglang', 'sglang_router', 'pandas', 'pyarrow'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert len(sys.modules) < 800, len(sys.modules)\n"  # torch alone has 1,500
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "did you mean --rollout-batch-size?" in done.stderr and "Traceback" not in done.stderr


def test_a_whole_resolution_imports_nothing_heavy(base: list[str]) -> None:
    code = (
        "import sys\nfrom slime.settings import parse_args\nparse_args(sys.argv[1:])\n"
        "assert not {'torch', 'transformers', 'ray', 'megatron', 'sglang'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *base], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_settings_that_slime_makes_itself_are_refused_with_what_to_use(base: list[str]) -> None:
    assert "--rollout-num-gpus-per-engine" in refused([*base, "--sglang-tp-size", "2"])
    assert "--hf-checkpoint" in refused([*base, "--sglang-model-path", "x"])
    assert "--bf16" in refused([*base, "--params-dtype", "fp16"])


def test_engines_get_exactly_what_was_given(base: list[str]) -> None:
    args = parse_args(
        [
            *base,
            "--sglang-disable-cuda-graph",
            "--sglang-mem-fraction-static",
            "0.2",
            "--no-bf16",
            "--router-policy",
            "random",
            "--sglang-log-requests-target",
            "a",
            "b",
        ]
    )
    assert dict(args.sglang) == {
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.2,
        "log_requests_target": ("a", "b"),
        "dtype": "float32",
    }
    assert dict(args.router) == {"policy": "random"}


def test_args_are_frozen_and_picklable_and_hide_secrets(base: list[str]) -> None:
    args = parse_args(
        [
            *base,
            "--wandb-key",
            "hunter2",
            "--sglang-api-key",
            "hunter3",
            "--eval-prompt-data",
            "a",
            base[3],
            "--eval-interval",
            "1",
        ]
    )
    with pytest.raises(AttributeError):
        args.lr = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        args.megatron["lr"] = 1.0  # type: ignore[index]
    with pytest.raises(AttributeError):
        _ = args.no_such_setting
    assert pickle.loads(pickle.dumps(args)) == args
    text = json.dumps(args.to_json_dict())
    assert "hunter" not in text and "hunter" not in explain(args)


def test_replace_returns_a_changed_copy(base: list[str]) -> None:
    args = parse_args(base)
    changed = args.replace(lr=0.5, rollout_batch_size=9)
    assert (changed.lr, changed.rollout_batch_size, args.lr, args.rollout_batch_size) == (0.5, 9, 1e-6, 4)
    with pytest.raises(ConfigError):
        args.replace(rollout_batch_sise=3)


def test_yaml_is_as_strict_as_flags(base: list[str], tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    more = [*base, "--custom-config-path", str(file)]
    file.write_text(
        "lr: 1.0e-5\nrollout_temperature: 0.7\nsglang_mem_fraction_static: 0.3\ncustom: {mis_level: token}\n"
    )
    args = parse_args(more)
    assert (args.lr, args.rollout_temperature, args.sglang["mem_fraction_static"]) == (1e-5, 0.7, 0.3)
    assert args.custom["mis_level"] == args.mis_level == "token"
    for text, said in [
        ("rollout_batch_sise: 3", "rollout_batch_size"),
        ("lr: fast", "a number"),
        ("colocate: 1", "true or false"),
        ("rollout_temperature: 0", "rollout_temperature"),
        ("rollout_batch_size: 5", "command line"),
        ("sglang_tp_size: 5", "--rollout-num-gpus-per-engine"),
        ("[1, 2]", "not a mapping"),
    ]:
        file.write_text(text)
        assert said in refused(more), text


def test_flags_behind_override_replace_what_the_file_says(base: list[str], tmp_path: Path) -> None:
    """Law: a flag and a file that differ are refused, unless the command line says which of them counts."""
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1.0e-5\ncolocate: true\nrollout_temperature: 0.7\n")
    more = [*base, "--custom-config-path", str(file)]
    assert "or write --override before the flag" in refused([*more, "--lr", "2e-5"])
    assert "rollout_temperature" in refused([*more, "--rollout-temperature", "1", "--override", "--lr", "2e-5"])
    assert "lr is 1e-05 here" in refused([*base, "--override", "--lr", "2e-5", *more[-2:]])
    args = parse_args([*more, "--override", "--lr", "2e-5"])
    assert (args.lr, args.rollout_temperature, args.colocate) == (2e-5, 0.7, True)
    assert re.search(r"lr = 2e-05 +\(command line\)", explain(args))
    assert not parse_args([*more, "--override", "--no-colocate"]).colocate


def test_help_and_explain_show_everything(base: list[str]) -> None:
    from slime.settings.all_flags import engine_flags, own_flags

    for owner in ("megatron", "sglang", "router"):
        text = help_text(owner)
        assert all(f.names[0] in text for f in engine_flags(owner))
    undocumented = [f.dest for f in own_flags(with_docs=True) if not f.doc]
    assert not undocumented
    text = explain(parse_args([*base, "--lr", "0.5"]))
    assert "megatron.lr = 0.5    (command line)" in text
    assert "megatron.num_layers = 2    (HF config)" in text
    assert "global_batch_size = 8    (derived: rollout_batch_size * n_samples_per_prompt" in text
    assert "eps_clip = 0.2    (default)" in text


@pytest.mark.parametrize("words", [["--help"], ["--help", "megatron"], ["-h"], ["--version"]])
def test_questions_are_answered_with_exit_code_zero(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_args(words)
    assert not end.value.code and capsys.readouterr().out


def test_num_epoch_counts_the_rows_of_the_slice(base: list[str]) -> None:
    data = base[3]
    words = [w for w in base if w not in ("--num-rollout", "3")]
    words[3] = f"{data}@[1:-1]"
    assert parse_args([*words, "--num-epoch", "2"]).num_rollout == 4


def test_num_epoch_counts_the_rows_of_a_compressed_file(base: list[str], tmp_path: Path) -> None:
    import zstandard

    data = tmp_path / "data.jsonl.zst"
    data.write_bytes(zstandard.compress(b'{"input": "1+1"}\n\n' * 10))
    words = [w for w in base if w not in ("--num-rollout", "3")]
    words[3] = f"{data}@[1:-1]"
    assert parse_args([*words, "--num-epoch", "2"]).num_rollout == 4
    data.write_bytes(b"no zstd")
    assert "cannot be read" in refused([*words, "--num-epoch", "2"])


def test_sft_needs_no_engine(base: list[str]) -> None:
    args = parse_args([*base, "--loss-type", "sft_loss"])
    assert args.debug_train_only and args.rollout_function_path == "slime.rollout.sft.generate_rollout"
    assert not args.compute_advantages_and_returns


def test_loading_from_the_empty_save_folder_is_a_fresh_start(base: list[str], tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")
    assert parse_args([*base, "--load", folder, "--save", folder]).load is None
    (tmp_path / "ckpt" / ".writing_step_000000").mkdir(parents=True)
    assert parse_args([*base, "--load", folder + "/", "--save", folder]).load is None, "a crash before the first save"
    step = [*base, "--load", folder, "--save", folder, "--ckpt-step", "4"]
    assert "which needs --load" in parse_args(step).idle["ckpt_step"]
    assert "which needs --load" in refused([*step, "--strict"])
    assert not parse_args([*base, "--load", folder, "--save", folder, "--finetune", "--strict"]).idle, "a later start"


def test_a_run_that_is_to_continue_does_not_start_anew(base: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    load = [*base, "--load", str(folder)]
    for _ in range(2):
        args = parse_args(load)
        assert args.load is None and replaced_folders(args) == [
            f"--load {folder} does not exist or is empty, so the run starts at step 0"
        ]
        assert "does not exist or is empty" in refused([*load, "--strict"])
        assert "ckpt" in refused([*load, "--ckpt-step", "4"])
        folder.mkdir(exist_ok=True)
    (folder / "other").touch()
    assert "has no checkpoint" in refused(load)
    (folder / "step_000004").mkdir()
    (folder / "step_000004" / "manifest.json").write_text("{}")
    assert parse_args(load).load == str(folder)
    assert parse_args([*base, "--load", str(folder / "step_000004")]).load is not None
    assert parse_args([*load, "--ckpt-step", "4"]).ckpt_step == 4
    assert "choose one of step_000004" in refused([*load, "--ckpt-step", "5"])
    assert "--finetune" in refused([*load, "--start-rollout-id", "1"])
    assert parse_args([*load, "--start-rollout-id", "1", "--finetune"]).start_rollout_id == 1


@pytest.mark.parametrize(
    ("export", "said"),
    [
        ("model", "hf_checkpoint"),
        ("other/../model/", "hf_checkpoint"),
        ("link", "hf_checkpoint"),
        ("ckpt", "save"),
        ("ckpt/step_{rollout_id:06d}", "save"),
        ("{rollout_id}", "the data"),
        ("7", "the data"),
        (".", "hf_checkpoint"),
        ("run", "run_dir"),
        ("/", "hf_checkpoint"),
    ],
)
def test_an_export_deletes_nothing(base: list[str], tmp_path: Path, export: str, said: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "model")
    (tmp_path / "7").mkdir()
    data = tmp_path / "7" / "more.jsonl"
    data.write_text('{"input": "1+1"}\n')
    words = [*base, "--save", str(tmp_path / "ckpt"), "--prompt-data", str(data)]
    message = refused([*words, "--save-hf", f"{tmp_path}/{export}" if export != "/" else "/"])
    assert "would delete it" in message and f"contains {said} " in message


@pytest.mark.parametrize(
    "export", ["hf", "hf/{rollout_id}", "model/export", "run/hf_{rollout_id}", "model-{rollout_id}"]
)
def test_an_export_has_a_folder_of_its_own(base: list[str], tmp_path: Path, export: str) -> None:
    words = [*base, "--save", str(tmp_path / "ckpt"), "--save-interval", "1"]
    assert parse_args([*words, "--save-hf", str(tmp_path / export)]).save_hf == str(tmp_path / export)


@pytest.mark.parametrize("flag", ["--save-debug-rollout-data", "--save-debug-train-data"])
def test_a_record_replaces_no_file_of_the_run(base: list[str], tmp_path: Path, flag: str) -> None:
    (tmp_path / "7").mkdir()
    data = tmp_path / "7" / "3"
    data.write_text('{"input": "1+1"}\n')
    (tmp_path / "mine.yaml").write_text("")
    words = [*base, "--prompt-data", str(data)]
    assert "would overwrite the data" in refused([*words, flag, f"{tmp_path}/7/../7/{{rollout_id}}"])
    assert parse_args([*words, flag, f"{tmp_path}/7/step_{{rollout_id}}"]).prompt_data == str(data)
    assert "overwrite custom_config_path" in refused(
        [*words, "--custom-config-path", str(tmp_path / "mine.yaml"), flag, str(tmp_path / "mine.yaml")]
    )
    other = ["--save-debug-rollout-data", "a/{rollout_id}", "--save-debug-train-data", "b/../a/{rollout_id}"]
    assert "would overwrite save_debug_train_data" in refused([*words, *other])
    assert "contains save_debug_train_data" in refused(
        [*words, "--save-hf", str(tmp_path / "hf"), "--save-debug-train-data", f"{tmp_path}/hf/{{rollout_id}}.npz"]
    )


def test_a_replay_writes_no_rollouts(base: list[str]) -> None:
    """Law: a replay never replaces the record that it reads, whichever setting names the same files."""
    words = [*base, "--load-debug-rollout-data", "dump/rollout_data/{rollout_id}.jsonl.zst"]
    args = parse_args([*words, "--save-debug-rollout-data", "./dump/rollout_data/{rollout_id}.pt"])
    assert args.save_debug_rollout_data is None and "which are not recorded again" in listed(args)
    args = parse_args([*words, "--dump-details", "dump"])
    assert args.save_debug_rollout_data is None and str(args.save_debug_train_data).startswith("dump/train_data")
    said = refused([*words, "--save-debug-train-data", "dump/rollout_data/{rollout_id}.jsonl.zst"])
    assert "would overwrite load_debug_rollout_data" in said


def test_evaluation_data_is_evaluated(base: list[str]) -> None:
    data = ["--eval-prompt-data", "a", base[3]]
    assert "--eval-interval" in listed(parse_args([*base, *data])), "it would never be evaluated"
    assert parse_args([*base, *data, "--num-rollout", "0"]).eval_interval is None


def test_a_single_evaluation_file_has_the_name_that_it_always_had(base: list[str]) -> None:
    args = parse_args([*base, "--eval-prompt-data", base[3], "--eval-interval", "1"])
    assert args.eval_prompt_data == ("aime", base[3])


def test_one_sample_per_prompt_learns_where_its_reward_is_not_normalised(base: list[str]) -> None:
    one = [*base, "--n-samples-per-prompt", "1"]
    for more in (["--disable-rewards-normalization"], ["--loss-type", "sft_loss"], ["--debug-rollout-only"]):
        parse_args([*one, *more])


def test_a_hook_for_rewards_replaces_their_normalisation(base: list[str]) -> None:
    args = parse_args([*base, "--custom-reward-post-process-path", "a.b"])
    assert args.rewards_normalization is False
    assert "custom-reward-post-process-path" in args.origins["rewards_normalization"]


def test_weights_cross_to_other_gpus_by_a_process_group(base: list[str]) -> None:
    def transport(*more: str) -> str:
        return parse_args([*base, *more]).update_weight_transport

    assert transport("--device", "cpu") == transport("--device", "cuda", "--colocate") == "tensor"
    assert transport("--device", "cuda") == "distributed"


def test_a_kl_loss_holds_to_the_reference(base: list[str]) -> None:
    assert parse_args([*base, "--use-kl-loss", "--kl-loss-coef", "0.1"]).kl_loss_type == "low_var_kl"
    assert parse_args([*base, "--use-kl-loss", "--kl-loss-type", "k1"]).kl_loss_coef == 0


def test_an_estimator_brings_what_it_needs(base: list[str]) -> None:
    def settings(*more: str) -> tuple[object, ...]:
        args = parse_args([*base, *more])
        return (
            args.policy_loss,
            args.loss_aggregation,
            args.normalize_advantages,
            args.critic_load,
            args.advantage_scale,
        )

    assert settings() == ("ppo_clip", "sequence_mean", False, None, "group")
    assert settings("--advantage-estimator", "gspo", "--disable-grpo-std-normalization")[::4] == ("gspo", "none")
    assert settings("--advantage-estimator", "ppo")[3] == base[1]
    assert settings("--advantage-estimator", "reinforce_plus_plus", "--calculate-per-token-loss")[1:3] == (
        "token_mean",
        True,
    )


def test_a_vocabulary_is_padded_to_the_ranks(base: list[str]) -> None:
    """The trainer pads it; only what cannot be padded has to divide."""
    config = Path(base[1]) / "config.json"
    config.write_text(json.dumps(QWEN3 | {"vocab_size": 255}))
    assert parse_args([*base, "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"]).vocab_size == 255


def test_one_run_has_one_id(base: list[str]) -> None:
    first, second = parse_args(base), parse_args(base)
    assert first.run_id != second.run_id
    words = [w for w in base if w != "--run-dir" and w != base[5]]
    args = parse_args(words)
    assert args.run_dir == f"runs/{args.run_id}"
    assert "unknown flag --run-id" in refused([*base, "--run-id", "mine"])


def test_the_earlier_name_of_the_mismatch_limit_is_known(base: list[str]) -> None:
    assert parse_args([*base, "--logprob-gap-limit", "0.5"]).mismatch_limit == 0.5


def test_help_says_no_default_of_what_must_be_given_and_breaks_no_flag() -> None:
    lines = help_text("slime").splitlines()
    texts = {line.split()[0]: lines[i + 1] for i, line in enumerate(lines) if line.startswith("  --")}
    assert texts["--hf-checkpoint"].endswith("Required.")
    assert texts["--rollout-temperature"].endswith("[default 1.0]")
    assert not [line for line in lines if line.endswith("-")], "a flag is not broken at its hyphens"


LISTS = ("--only-train-params-name-list", "--spec", "--eval-prompt-data", "--rollout-stop", "--rollout-stop-token-ids")


@pytest.mark.parametrize("flag", [*LISTS, "--eval-max-context-len", "--sglang-cuda-graph-bs"])
def test_none_is_as_if_a_setting_had_not_been_given(base: list[str], flag: str) -> None:
    args = parse_args([*base, flag, "none"])
    assert getattr(args, flag[2:].replace("-", "_"), None) is None and not args.idle


def test_an_empty_list_of_a_file_asks_for_nothing(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("spec: []\nonly_train_params_name_list: []\nrollout_stop: []\n")
    assert not parse_args([*base, "--custom-config-path", str(tmp_path / "own.yaml")]).spec
