"""What cannot work is refused before anything starts, and the message says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.settings import parse_args
from tests.support.command_line import listed, refused

REFUSALS = [
    ("--global-batch-size 3", "does not divide"),
    ("--global-batch-size 4 --num-steps-per-rollout 1", "only one of the two"),
    ("--over-sampling-batch-size 2", "over_sampling_batch_size 2"),
    ("--tensor-model-parallel-size 2", "do not divide the 1 training GPUs"),
    ("--actor-num-gpus-per-node 3 --tensor-model-parallel-size 3", "does not divide"),
    ("--rollout-num-gpus-per-engine 3", "attention heads"),
    ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "rollout_num_gpus 3 is not a multiple"),
    ("--pipeline-model-parallel-size 2", "pipeline_model_parallel_size 2"),
    ("--fp16 --bf16", "one of them"),
    ("--kernels fused", "runs on a CPU"),
    ("--kernels fused --device cuda --no-bf16", "training dtype is float32"),
    ("--kernels flash4", "runs on a CPU"),
    ("--fp8-format hybrid --fp8-recipe blockwise", "--fp8-format e4m3 --fp8-recipe blockwise"),
    ("--fp8-format e4m3", "--fp8-recipe delayed needs Transformer Engine"),
    ("--fp8-format e4m3 --fp8-recipe blockwise --fp8-wgrad", "how samples are packed"),
    ("--fp8-format e4m3 --fp8-recipe blockwise --device cuda --no-bf16", "needs --bf16 on a GPU"),
    ("--fp8-format e4m3 --fp8-recipe blockwise --true-on-policy --device cuda", "drop one of them"),
    ("--rollout-temperature 0", "at least 0.01"),
    ("--rollout-top-p 0.9 --use-rollout-logprobs", "truncated distribution"),
    ("--rollout-top-k 8 --use-kl-loss --kl-loss-coef 0.1", "use --kl-coef"),
    ("--rollout-top-p 0", "0.001 <= top_p <= 1"),
    ("--rollout-top-k 0", "-1 for all"),
    ("--actor-num-nodes 2", "set --ray-address"),
    ("--max-restarts 1", "needs --save"),
    ("--max-restarts 1 --save a", "set --load a"),
    ("--max-restarts 1 --save a --load a", "needs --save-interval"),
    ("--max-restarts 1 --save a --load a --save-interval 1 --finetune", "back to the same step"),
    ("--router-host 0.0.0.0", "needs --router-api-key"),
    ("--router-api-key a --sglang-api-key b", "one key for both"),
    ("--sglang-tokenizer-worker-num 2", "SGLang cannot check keys"),
    ("--device cuda --update-weight-transport tensor", "requires --colocate on cuda"),
    ("--rollout-num-gpus-per-engine 2 --sglang-pp-size 4", "does not divide the 2 GPUs"),
    ("--rollout-num-gpus-per-engine 2 --sglang-dp-size 2", "--sglang-enable-dp-attention"),
    ("--rollout-num-gpus-per-engine 2 --sglang-ep-size 2", "0 experts"),
    (
        "--rollout-num-gpus-per-engine 2 --sglang-dp-size 2 --sglang-enable-dp-attention",
        "neither expert parallelism nor DP attention",
    ),
    (
        "--rollout-num-gpus-per-engine 2 --sglang-pp-size 2 --pause-generation-mode retract --fully-async",
        "with sglang_pp_size 2",
    ),
    (
        "--rollout-num-gpus-per-engine 2 --sglang-pp-size 2 --pause-generation-mode auto --fully-async",
        "--pause-generation-mode auto does not work with sglang_pp_size 2",
    ),
    ("--sglang-moe-a2a-backend deepep", "not hold the tensors that the trainer verifies"),
    ("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k1", "expected gradient of k1 as a loss is zero"),
    ("--n-samples-per-prompt 1", "every advantage is zero"),
    ("--custom-reward-post-process-path a.b --rewards-normalization", "--custom-reward-post-process-path again"),
    ("--start-rollout-id -1", "at least 0"),
    ("--prompt-data data.jsonl@[1:2:3]", "@[start:stop]"),
    ("--save-hf {step}", "can only contain {rollout_id}"),
    ("--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "apply the KL twice"),
    ("--calculate-per-token-loss --loss-aggregation sequence_sum", "set only one of them"),
    ("--use-tis --tis-clip 0.5 --tis-clip-low 0.6", "--tis-clip-low 0.6 and --tis-clip 0.5"),
    ("--advantage-estimator ppo --observation-returns reset", "skip or through"),
    ("--advantage-estimator ppo --lambd 1.5", "--lambd is 1.5"),
    ("--use-opd", "needs --opd-type"),
    ("--use-opd --opd-type megatron", "megatron needs the folder"),
    ("--use-dynamic-global-batch-size --global-batch-size 4", "no fixed size"),
    ("--advantage-estimator ppo --critic-load missing", "critic_load missing"),
    ("--use-tis --use-rollout-logprobs", "compare"),
    ("--loss-type custom_loss", "need each other"),
    ("--max-tokens-per-gpu none", "--max-tokens-per-gpu is none"),
    ("--eval-interval 2", "--eval-prompt-data"),
    ("--eval-interval 1 --eval-prompt-data a b only-a-name", "pairs"),
    ("--save-interval 2", "needs --save"),
    ("--save s --save-keep-last 0", "must be at least 1"),
    ("--prompt-data missing.jsonl", "does not exist"),
    ("--hf-checkpoint missing", "config.json does not exist"),
    ("--rm-type remote_rm", "--rm-url"),
    ("--group-rm", "--custom-rm-path"),
    ("--debug-rollout-only --debug-train-only", "leave nothing to run"),
    ("--hidden-dropout 0.1", "drop the flag"),
    ("--moe-aux-loss-coeff 0.1", "other tokens of its micro-batch"),
    ("--expert-model-parallel-size 2", "0 experts"),
    ("--n-samples-per-prompt 0", "at least 1"),
    ("--lr fast", "a number"),
    ("--lr", "no value"),
    ("--colocate=yes", "switch"),
    ("--kl-loss-type k9", "k1"),
    ("--train-env-vars [1]", "JSON object"),
    ("--freeze-params-name-list a --only-train-params-name-list b", "both select what is trained"),
    ("--freeze-params-name-list a --lora-rank 4", "both select what is trained"),
    ("--freeze-params-name-list a(", "not a regular expression"),
    ("--lora-rank 0", "at least 1"),
    ("--lora-rank 4 --lora-alpha 0", "--lora-alpha is 0.0, but must be > 0"),
    ("--kl-coef 0.1 --ref-update-interval 0", "at least 1"),
    ("stray", "does not belong to a flag"),
    ("--lr -1e-5", "--lr is -1e-05, but must be at least 0"),
    ("--lr nan", "--lr is nan, which is not a finite number"),
    ("--weight-decay -0.1", "--weight-decay is -0.1"),
    ("--adam-beta2 1", "--adam-beta2 is 1.0, but must be at least 0 and < 1"),
    ("--context-parallel-size 0", "--context-parallel-size is 0"),
    ("--lr-decay-style cosine --lr 1e-6 --min-lr 1e-5", "could not decay"),
    ("--lr-decay-style cosine --lr-warmup-iters 3", "lower --lr-warmup-iters"),
]


IDLE = [
    ('--apply-chat-template-kwargs {"a":1}', "which needs --apply-chat-template"),
    ("--eps-clip-c 3 --policy-loss sapo", "which needs policy_loss gspo or ppo_clip"),
    ("--gamma 0.9", "which needs advantage_estimator grpo_turn or ppo or reinforce_plus_plus"),
    ("--custom-tis-function-path a.b", "which needs --use-tis"),
    ("--kl-loss-coef 0.1", "which needs --use-kl-loss"),
    ("--async-save", "which needs --save"),
    ("--save s --save-retain-interval 5", "which needs --save-keep-last"),
    ("--ckpt-step 3", "which needs --load"),
    ("--finetune", "which needs --load"),
    ("--offload", "which needs --colocate"),
    ("--critic-load missing", "critic_load missing"),
    ("--qwen-gdn-backend torch", "a checkpoint of model_type qwen3_next"),
    ("--moe-router-load-balancing-type seq_aux_loss", "which needs --moe-aux-loss-coeff"),
]


@pytest.mark.parametrize(("flags", "said"), REFUSALS)
def test_what_cannot_work_is_refused(base: list[str], flags: str, said: str) -> None:
    assert said in refused([*base, *flags.split()])


@pytest.mark.parametrize(("flags", "said"), IDLE)
def test_what_would_be_ignored_is_listed_and_refused_with_strict(base: list[str], flags: str, said: str) -> None:
    assert said in listed(parse_args([*base, *flags.split()]))
    assert said in refused([*base, *flags.split(), "--strict"])


def test_async_and_colocate_exclude_each_other(base: list[str]) -> None:
    assert "--colocate" in refused([*base, "--colocate"], synchronous=False)
    assert parse_args([*base, "--update-weights-interval", "2"], synchronous=False).update_weights_interval == 2


def test_all_contradictions_are_reported_together(base: list[str]) -> None:
    message = refused([*base, "--kl-loss-coef", "1", "--rollout-temperature", "0", "--num-layers", "9", "--strict"])
    assert "3 problems" in message


def test_lengths_that_say_the_same_are_taken(base: list[str]) -> None:
    """Ten rows are two batches of four."""
    assert parse_args([*base, "--num-rollout", "4", "--num-epoch", "2"]).num_rollout == 4


def test_an_epoch_of_no_batch_is_refused(base: list[str]) -> None:
    at = base.index("--num-rollout")
    words = [*base[:at], *base[at + 2 :], "--num-epoch", "1", "--rollout-batch-size", "11"]
    assert "lower --rollout-batch-size" in refused(words)


@pytest.mark.parametrize("epsilon", ["1e-6", "0.000001", "9.999999974752427e-07"])
def test_a_number_that_went_through_float32_is_the_same(base: list[str], epsilon: str) -> None:
    """Of 1e-6 in the checkpoint."""
    assert parse_args([*base, "--norm-epsilon", epsilon]).layernorm_epsilon == 1e-6
    assert "--layernorm-epsilon or --norm-epsilon 1e-05" in refused([*base, "--norm-epsilon", "1e-5"])


def test_required_settings_are_named() -> None:
    message = refused([])
    assert all(name in message for name in ("--hf-checkpoint", "--rollout-batch-size", "--num-rollout"))


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({}, [], "no kernels for it on a CPU"),
        ({"model_type": "llama"}, ["--device", "cuda", "--bf16"], "does not load; run"),
        ({}, ["--device", "cuda", "--sglang-dtype", "float16"], "sglang_dtype float16"),
        ({}, ["--device", "cuda", "--bf16", *["--rollout-external-engine-addrs", "127.0.0.1:1"]], "external engines"),
        (
            {},
            [*["--trainer-weights", "fake-quantised", "--lora-rank", "4", "--debug-train-only"]],
            "with --lora-rank 4",
        ),
    ],
)
def test_engines_that_cannot_take_quantised_weights_are_refused(
    base: list[str], changes: dict[str, str], more: list[str], message: str
) -> None:
    path = Path(base[base.index("--hf-checkpoint") + 1]) / "config.json"
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **quantised, **changes}))
    assert message in refused([*base, *more])
    assert parse_args([*base, "--debug-train-only", "--load-debug-rollout-data", "x_{rollout_id}"]).debug_train_only


def test_engines_on_a_gpu_take_quantised_weights(base: list[str]) -> None:
    path = Path(base[base.index("--hf-checkpoint") + 1]) / "config.json"
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **quantised}))
    args = parse_args([*base, "--device", "cuda", "--bf16", "--trainer-weights", "fake-quantised"])
    assert args.trainer_weights == "fake-quantised" and "trainer_weights" not in args.idle


def test_fake_quantised_weights_need_a_quantised_checkpoint(base: list[str]) -> None:
    assert "trainer_weights" in parse_args([*base, "--trainer-weights", "fake-quantised"]).idle


@pytest.mark.parametrize("flag", ["quantization fp8", "enable-eplb", "ep-num-redundant-experts 2"])
def test_engines_that_would_hold_other_tensors_are_refused(base: list[str], flag: str) -> None:
    assert "verifies after each sync" in refused([*base, *f"--sglang-{flag}".split()])
