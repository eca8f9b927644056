"""What flags of the public slime mean here, where that is something else: the tables of docs/migration.md.

`slime train --help public` prints them, and a test holds the document to them. A flag that is refused is answered from
here as well (`slime.settings.public_flags`). What is not here is meant to mean the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slime.settings.fields import declared, own_fields
from slime.settings.groups.launch_scripts import LaunchScriptSettings


@dataclass(frozen=True, slots=True)
class Difference:
    """Flags that are taken, with a meaning of their own."""

    written: str
    """As in a script: flags, perhaps with a value."""
    here: str
    """What that does here, and why."""


DIFFERENT: tuple[Difference, ...] = (
    Difference(
        "`--hidden-size`, `--num-layers` and the model's other sizes, `--spec`, `--use-gated-attention`, "
        "`--post-mlp-layernorm`, `--use-rope-scaling`, `--model-name`",
        "taken when they say what `config.json` says, otherwise refused",
    ),
    Difference(
        "`--attention-backend`, `--transformer-impl`, `--moe-enable-deepep` and other flags of Megatron",
        "listed as without effect, with the reason; refused with `--strict`",
    ),
    Difference(
        "`--moe-router-dtype fp32`",
        "router logits in float32, also where the model has them in its own dtype; engines keep theirs, and the "
        "mismatch is measured",
    ),
    Difference(
        "`--ref-load X`",
        "the trainer's first weights, and the reference. A folder in Hugging Face format; of a `torch_dist` folder: "
        "`slime convert X OUT --hf-checkpoint MODEL --trust-pickle` "
        "([checkpoints](checkpoints.md#megatrons-torch_dist))",
    ),
    Difference(
        "`--load X`",
        "a checkpoint of slime, or a folder in Hugging Face format, which goes before `--ref-load` as first weights. "
        "A folder that is missing is refused, unless it is `--save`",
    ),
    Difference(
        "`--save X`",
        "slime's own checkpoints; `--save-hf` for Hugging Face folders; for Megatron: `slime convert X OUT --to "
        "torch_dist`",
    ),
    Difference("a tool that converts to or from `torch_dist`", "`slime convert`, without GPUs and without ranks"),
    Difference(
        "`--save-debug-rollout-data X.pt`",
        "the same path with the ending `.jsonl.zst`, without pickles; `.npz` for `--save-debug-train-data`",
    ),
    Difference(
        "`--load-debug-rollout-data X.pt`",
        "`slime convert X.pt X.jsonl.zst --trust-pickle` first, for each file ([workflows](workflows.md))",
    ),
    Difference(
        "`--multimodal-keys`",
        '`{"image": COLUMN}` with a dense Qwen3-VL; the tower is frozen, videos and audio are refused '
        "([vision.md](vision.md))",
    ),
    Difference("`--eval-prompt-data FILE`", "a data set called aime"),
    Difference("`--eval-prompt-data` without `--eval-interval`", "listed as without effect"),
    Difference("`--eval-prompt-data` under `--loss-type sft_loss`", "the held-out loss"),
    Difference(
        "`--custom-config-path` with keys that name no setting",
        "your own, as `args.name`, if the run has a function of your own; listed",
    ),
    Difference(
        "`--megatron-config-path`",
        "settings of one role; what roles share, as parallel sizes, is refused in it if it is not the run's. `load` of "
        "the critic is `--critic-load`",
    ),
    Difference("`--balance-by-flops`", "`--balance-data`, which always weighs samples so"),
    Difference("`--kl-loss-type`", "the default is low_var_kl; k1 with a coefficient is refused"),
    Difference("`--kl-coef`", "acts in every estimator"),
    Difference("`--actor-num-gpus-per-node`", "the default is 1"),
    Difference(
        "`--rollout-max-response-len`",
        "the default is 1024; of each answer, as there; `--rollout-max-total-response-len` bounds all of an execution",
    ),
    Difference(
        "`--rollout-max-context-len`, `--eval-max-context-len`",
        "also bound what is generated: an answer ends where its conversation is as long",
    ),
    Difference("`--log-probs-chunk-size`", "the default is 1024"),
    Difference(
        "`--rollout-health-check-interval`", "the default is 5 s, not 30; processes are looked at every second besides"
    ),
    Difference(
        "`--use-fault-tolerance`", "on by default; with `--no-use-fault-tolerance` the run ends when an engine does"
    ),
    Difference("`--check-weight-update-equal`", "always so: every weight sync is verified, and its `--no-` is refused"),
    Difference(
        "`--use-tis` with `--fully-async`",
        "on by default for the policy loss, where no `--use-rollout-logprobs`, `--rejection-level` or list of "
        "corrections takes its place",
    ),
    Difference(
        "`--qwen-gdn-backend`",
        "the default is auto: fla where its kernels are installed and can run, else torch, which is plain PyTorch",
    ),
    Difference(
        "`--global-batch-size` that does not divide the executions of a rollout",
        "refused: some would never be trained; nothing is dropped",
    ),
    Difference(
        "`--offload`, `--offload-train`, `--offload-rollout` without `--colocate`",
        "listed as without effect: nothing else needs the memory",
    ),
    Difference("`--n-samples-per-prompt 1` with normalised rewards", "refused: every advantage would be zero"),
    Difference("`--update-weights-interval` in train.py", "refused where it is not 1: every step syncs"),
    Difference(
        "`--custom-loss-function-path`",
        "gets log-probs; with `--custom-loss-logits` the logits `[1, T, V]`. Of the batch `unconcat_tokens`, "
        "`total_lengths`, `response_lengths` and `loss_masks` are lists with one entry per sample; `advantages` and "
        "its like are flat tensors over all response tokens, to be split by `response_lengths`; the old `log_probs` "
        "are `old_log_probs` ([customization.md](customization.md#advantages-and-losses))",
    ),
    Difference(
        "`--custom-rm-path`",
        "called for one sample at a time, siblings of a fan-out one by one (all samples of a prompt with "
        "`--group-rm`), in a process of its own, with `--reward-timeout-s`",
    ),
    Difference(
        "`--profile-target`, `--memory-snapshot-dir`",
        "traces are in the run folder, and snapshots too by default; all three parts are traced; `rollout` is a target",
    ),
    Difference("`--sglang-router-ip`, `--sglang-router-port`", "the router has to ask for a key, `--router-api-key`"),
    Difference(
        "`--rollout-external-engine-addrs`",
        "engines are asked at the start of the run, not while flags are read; they are started with a few flags "
        "([topologies.md](topologies.md#engines-that-run-already)), and may end, come back, join and leave",
    ),
)
"""In the order of the document."""

_DEEPGEMM = "drop it: the trainer has no kernels of DeepGEMM; the mismatch to the engine is measured in every step"
_TEACHER = "use --opd-teacher-url of an SGLang server with the teacher, or --opd-type megatron"
_CHECKS = "drop it: a run checks itself, see --mismatch-limit"
_ONE_SET = "drop it: a folder in Hugging Face format holds one set of weights"

REFUSED: Mapping[str, str] = {
    "custom-model-provider-path": (
        "use --model-family, a family of your own: a model that only the trainer can build reaches no engine, "
        "checkpoint or export"
    ),
    "disable-rollout-global-dataset": "leave --prompt-data out, with your own --data-source or --rollout-function-path",
    "load-forge-rollout-data": "use --load-debug-rollout-data, which replays rollouts without engines",
    "release-train": "use --offload-train, which leaves the GPU to the engines",
    "use-stateless-adam": (
        "use --adam-beta1 0 --adam-beta2 0, which make the same update; --use-precision-aware-optimizer and "
        "--optimizer-cpu-offload make their state small"
    ),
    "use-distributed-post": "use --rollout-num-workers, whose processes send requests from all hosts",
    "sglang-router-request-timeout-secs": "use --router-request-timeout-secs",
    **dict.fromkeys(("ref-ckpt-step", "opd-teacher-ckpt-step"), _ONE_SET),
    **dict.fromkeys(
        (
            "ci-test",
            "ci-disable-kl-checker",
            "ci-load-grad-norm",
            "ci-save-grad-norm",
            "ci-train-rollout-logprob-abs-diff-threshold",
        ),
        _CHECKS,
    ),
    **dict.fromkeys(
        (
            "megatron-deepgemm-forward-layers",
            "megatron-deepgemm-forward-modules",
            "megatron-deepgemm-moe-forward-layers",
            "megatron-deepgemm-moe-forward-modules",
        ),
        _DEEPGEMM,
    ),
    **dict.fromkeys(
        (
            "teacher-port",
            "teacher-warmup-port",
            "teacher-warmup-timeout-s",
            "teacher-label-reduction-chunk-size",
            "teacher-sample-reduction-chunk-size",
            "megatron-server-max-length",
            "megatron-server-update-timeout-s",
            "megatron-server-warmup",
        ),
        _TEACHER,
    ),
}
"""A flag without its dashes at the front -> what to do, said after its name."""


def tables() -> str:
    """Three tables in Markdown: other meanings, flags without effect, flags that are refused."""
    rows = [(one.written, one.here) for one in DIFFERENT]
    parts = [
        "These are taken, and mean something else or more:",
        _table(("in a script", "here"), rows),
        "These are taken and listed as without effect; `--strict` refuses them:",
        _table(("in a script", "needs"), list(_without_effect())),
        "These are refused by name, with what to do in the message:",
        refused_table(),
    ]
    return "\n\n".join(parts)


def refused_table() -> str:
    """The last of the three, whose flags do not exist."""
    return _table(("flag", "do"), list(_grouped(REFUSED)))


def _without_effect() -> Iterator[tuple[str, str]]:
    """Flags that agree with nothing and act on nothing, by what they would need."""
    needs = {
        field.name: declared(field).conditions[0].text
        for field in own_fields(LaunchScriptSettings)
        if declared(field).conditions
    }
    yield from _grouped({name.replace("_", "-"): text for name, text in needs.items()})


def _grouped(answers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(flags, answer): those with the same answer in one row."""
    for answer in dict.fromkeys(answers.values()):
        flags = ", ".join(f"`--{name}`" for name, text in answers.items() if text == answer)
        yield flags, answer


def _table(heads: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [heads, ("---", "---"), *rows]
    return "\n".join(f"| {left} | {right} |".replace("| --- | --- |", "|---|---|") for left, right in lines)


# Names that other programs give a setting, and how it is written here: for messages about unknown flags only.
#
# None of them is taken: a name that means almost the same (a batch counted per device, a penalty inside the reward)
# would be a silent difference. Where the meaning differs, the answer says how.

_MODEL = "use --hf-checkpoint DIR, a folder in Hugging Face format"
_DATA = "use --prompt-data FILE, a .jsonl or .parquet file, with --input-key and --label-key for its columns"
_EVAL_DATA = "use --eval-prompt-data NAME FILE, and --eval-interval"
_GROUP = "use --n-samples-per-prompt, the samples of each prompt"
_ONE_FORMAT = "drop it: checkpoints have one format"
_PROMPTS = "use --rollout-batch-size, counted in prompts per step"
_OPTIMIZER_BATCH = (
    "use --global-batch-size for the samples of an optimizer step, all devices together, and --micro-batch-size or "
    "--max-tokens-per-gpu for those of a forward pass"
)
_EPOCHS_OVER_BATCH = "use --num-steps-per-rollout: optimizer steps per generated batch, each on other samples"
_EPOCHS = "use --num-epoch, or --num-rollout for a number of steps"
_STEPS = "use --num-rollout, each step with --num-steps-per-rollout optimizer steps"
_RESPONSE = (
    "use --rollout-max-response-len, in tokens of each answer (--rollout-max-total-response-len: of all its turns)"
)
_PROMPT_LENGTH = "use --rollout-max-prompt-len, in tokens; longer prompts are left out, not shortened"
_CONTEXT = "use --rollout-max-context-len for prompt and response together"
_KL = "use --kl-coef for a penalty inside the reward, or --use-kl-loss --kl-loss-coef for a term of the loss"
_CLIP = "use --eps-clip, and --eps-clip-high for the upper side"
_CLIP_HIGH = "use --eps-clip-high"
_WARM_UP = "use --lr-warmup-fraction, or --lr-warmup-iters for a number of optimizer steps"
_SCHEDULE = "use --lr-decay-style: constant, linear, cosine, inverse-square-root or WSD"
_CLIP_GRAD = "use --clip-grad"
_RECOMPUTE = "use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_LORA = "use --lora-rank N; giving it switches adapters on"
_NO_LORA_DROPOUT = "drop it: adapters are trained without dropout, so that the engines compute what is trained"
_REWARD = "use --rm-type NAME for a built-in grader, or --custom-rm-path pkg.mod:fn for a function of your own"
_SAVE = "use --save DIR for checkpoints, --save-hf DIR for an export, --run-dir DIR for metrics and logs"
_SAVE_EVERY = "use --save-interval, in steps, with --save DIR"
_EVAL_EVERY = "use --eval-interval, in steps"
_LOAD = "use --load DIR, the --save folder of the run to continue"
_KEEP = "use --save-keep-last"
_ENGINE = "drop it: SGLang is the engine, and its settings are described by --help sglang"
_ENGINE_MEMORY = "use --sglang-mem-fraction-static"
_ENGINE_RANKS = "use --rollout-num-gpus-per-engine"
_ENGINES = "use --rollout-num-gpus, with --rollout-num-gpus-per-engine for the size of an engine"
_SHARED = "use --colocate: training and engines share the GPUs"
_SHARDING = "drop it: the distributed optimizer shards already; for more see --tensor-model-parallel-size"
_DTYPE = "use --bf16 (the default), --fp16 or --no-bf16; the engines serve in the same dtype"
_TRACKING = "use --use-wandb or --use-tensorboard; metrics.jsonl and the console are always written"
_WANDB_PROJECT = "use --wandb-project"
_RUN_NAME = "use --wandb-group, and --run-dir for the run's folder"
_ALWAYS_LOGGED = "drop it: every step is logged"
_TOKENIZER = "drop it: the tokenizer is that of --hf-checkpoint"
_FROM_CHECKPOINT = "drop it: the checkpoint's config.json says it"
_OWN_LAYERS = "drop it: attention is the trainer's own"
_NORMALIZATION = "use --disable-grpo-std-normalization to leave the division by the standard deviation out"
_NODES = "use --actor-num-nodes for the hosts that train, and --actor-num-gpus-per-node for the GPUs of each"
_TRAIN_RANKS = "use --actor-num-gpus-per-node (on a CPU: the number of ranks)"
_ESTIMATOR = "use --advantage-estimator"

_GENERAL: Mapping[str, str] = {
    **dict.fromkeys(("model", "model-path", "base-model", "checkpoint"), _MODEL),
    **dict.fromkeys(("data", "dataset", "data-path", "train-data", "train-file", "train-files"), _DATA),
    **dict.fromkeys(("eval-data", "eval-dataset", "val-data", "test-data", "val-files", "val-file"), _EVAL_DATA),
    **dict.fromkeys(("batch-size", "train-batch-size", "mini-batch-size"), f"{_PROMPTS}; {_OPTIMIZER_BATCH}"),
    **dict.fromkeys(("epochs", "num-epochs", "max-epochs", "total-epochs", "n-epochs"), _EPOCHS),
    **dict.fromkeys(("steps", "num-steps", "max-iters", "iterations", "total-steps"), _STEPS),
    **dict.fromkeys(("group-size", "num-samples", "n-samples", "samples-per-prompt"), _GROUP),
    **dict.fromkeys(("lr-scheduler", "scheduler", "schedule"), _SCHEDULE),
    **dict.fromkeys(("warmup", "num-warmup-steps"), _WARM_UP),
    **dict.fromkeys(("grad-clip", "clip-grad-norm", "gradient-clipping", "max-norm"), _CLIP_GRAD),
    **dict.fromkeys(("clip-ratio", "clip-range", "cliprange", "clip-eps"), _CLIP),
    **dict.fromkeys(("kl-beta", "kl-penalty", "kl-loss-weight"), _KL),
    **dict.fromkeys(("max-tokens", "max-new-tokens", "max-response-len", "max-response-length"), _RESPONSE),
    **dict.fromkeys(("max-prompt-len", "max-input-length"), _PROMPT_LENGTH),
    **dict.fromkeys(("max-len", "max-seq-len", "max-model-len"), _CONTEXT),
    **dict.fromkeys(("reward", "reward-fn", "reward-function", "reward-path", "rm-path", "verifier"), _REWARD),
    **dict.fromkeys(("save-dir", "checkpoint-dir", "out-dir", "output"), _SAVE),
    **dict.fromkeys(("save-every", "save-freq"), _SAVE_EVERY),
    **dict.fromkeys(("eval-every", "eval-freq", "test-freq"), _EVAL_EVERY),
    **dict.fromkeys(("resume", "resume-from", "load-path"), _LOAD),
    **dict.fromkeys(("logger", "log-with", "wandb", "tensorboard"), _TRACKING),
    **dict.fromkeys(("project-name", "project"), _WANDB_PROJECT),
    **dict.fromkeys(("experiment-name", "exp-name"), _RUN_NAME),
    **dict.fromkeys(
        ("gpus", "num-gpus", "n-gpus", "world-size"), f"{_TRAIN_RANKS}, and {_ENGINES.removeprefix('use ')}"
    ),
    **dict.fromkeys(("dtype", "precision", "mixed-precision"), _DTYPE),
    **dict.fromkeys(
        ("tp", "tp-size"), "use --tensor-model-parallel-size, and --rollout-num-gpus-per-engine of an engine"
    ),
    **dict.fromkeys(("pp", "pp-size"), "use --pipeline-model-parallel-size"),
    **dict.fromkeys(("ep", "ep-size"), "use --expert-model-parallel-size"),
    **dict.fromkeys(("cp", "cp-size"), "use --context-parallel-size"),
    **dict.fromkeys(("algorithm", "algo", "adv-estimator"), _ESTIMATOR),
    **dict.fromkeys(
        ("temperature", "sampling-temperature"), "use --rollout-temperature (evaluation: --eval-temperature)"
    ),
    "top-p": "use --rollout-top-p (evaluation: --eval-top-p)",
    "top-k": "use --rollout-top-k (evaluation: --eval-top-k)",
    "shuffle": "use --rollout-shuffle",
    "tokenizer": _TOKENIZER,
    "ref-model": "use --ref-load DIR",
}

_TRL: Mapping[str, str] = {
    "learning-rate": "use --lr",
    "num-generations": _GROUP,
    "model-name-or-path": _MODEL,
    **dict.fromkeys(("dataset-name", "dataset-path"), _DATA),
    "output-dir": _SAVE,
    "per-device-train-batch-size": f"{_PROMPTS}; {_OPTIMIZER_BATCH}",
    "per-device-eval-batch-size": "drop it: the engines batch the requests of an evaluation themselves",
    "gradient-accumulation-steps": f"{_OPTIMIZER_BATCH}; accumulation follows",
    "generation-batch-size": f"{_PROMPTS}; {_GROUP}",
    "steps-per-generation": _EPOCHS_OVER_BATCH,
    "num-iterations": _EPOCHS_OVER_BATCH,
    "num-train-epochs": _EPOCHS,
    "max-steps": _STEPS,
    "max-prompt-length": _PROMPT_LENGTH,
    "max-completion-length": _RESPONSE,
    "max-length": _CONTEXT,
    "beta": _KL,
    "epsilon": _CLIP,
    "epsilon-high": _CLIP_HIGH,
    "delta": "use --eps-clip-c, the bound of dual clipping",
    "scale-rewards": _NORMALIZATION,
    "reward-funcs": _REWARD,
    "reward-model-path": _REWARD,
    "lr-scheduler-type": _SCHEDULE,
    **dict.fromkeys(("warmup-ratio", "warmup-steps"), _WARM_UP),
    "max-grad-norm": _CLIP_GRAD,
    "adam-epsilon": "use --adam-eps",
    "optim": "drop it: the optimizer is Adam",
    **dict.fromkeys(("use-peft", "use-lora", "lora-r"), _LORA),
    "lora-dropout": _NO_LORA_DROPOUT,
    **dict.fromkeys(("load-in-4bit", "load-in-8bit"), "drop it: weights are trained in --bf16, --fp16 or float32"),
    "gradient-checkpointing": _RECOMPUTE,
    "sync-ref-model": "use --ref-update-interval, in steps",
    "ref-model-sync-steps": "use --ref-update-interval, in steps",
    **dict.fromkeys(("use-vllm", "vllm-mode", "vllm-server-host", "vllm-server-port"), _ENGINE),
    "vllm-gpu-memory-utilization": _ENGINE_MEMORY,
    "vllm-tensor-parallel-size": _ENGINE_RANKS,
    "vllm-max-model-length": "use --sglang-context-length",
    "torch-dtype": _DTYPE,
    "attn-implementation": _OWN_LAYERS,
    "trust-remote-code": "drop it: only the model families of slime are trained, with code of its own",
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp-config", "zero-stage"), _SHARDING),
    "report-to": _TRACKING,
    "run-name": _RUN_NAME,
    "logging-steps": _ALWAYS_LOGGED,
    "logging-dir": "use --run-dir DIR",
    **dict.fromkeys(("save-steps", "save-strategy"), _SAVE_EVERY),
    **dict.fromkeys(("eval-steps", "eval-strategy", "do-eval"), _EVAL_EVERY),
    "save-total-limit": _KEEP,
    "resume-from-checkpoint": _LOAD,
    "do-train": "drop it: train.py trains; --num-rollout 0 evaluates only",
    "packing": "drop it: samples are always packed without padding",
}

_OPENRLHF: Mapping[str, str] = {
    "pretrain": _MODEL,
    "micro-train-batch-size": _OPTIMIZER_BATCH,
    "micro-rollout-batch-size": "drop it: the engines batch requests themselves",
    "num-episodes": _EPOCHS,
    "prompt-max-len": _PROMPT_LENGTH,
    "generate-max-len": _RESPONSE,
    "actor-learning-rate": "use --lr",
    "critic-learning-rate": "use --critic-lr",
    "init-kl-coef": _KL,
    "eps-clip-low-high": _CLIP,
    "reward-pretrain": _REWARD,
    "remote-rm-url": "use --rm-type remote_rm --rm-url URL",
    "save-path": _SAVE,
    "ckpt-path": "use --save DIR",
    "load-checkpoint": _LOAD,
    "vllm-num-engines": _ENGINES,
    "colocate-all-models": _SHARED,
    **dict.fromkeys(("actor-num-gpus", "actor-num-gpus-per-actor"), _TRAIN_RANKS),
    "packing-samples": "drop it: samples are always packed without padding",
}

_MEGATRON: Mapping[str, str] = {
    "train-samples": "use --num-rollout, or --num-epoch",
    **dict.fromkeys(("lr-warmup-samples", "lr-decay-samples"), "use --lr-warmup-iters and --lr-decay-iters"),
    **dict.fromkeys(("train-data-path", "valid-data-path", "split", "num-workers"), _DATA),
    **dict.fromkeys(("tokenizer-type", "tokenizer-model", "tokenizer-name-or-path"), _TOKENIZER),
    **dict.fromkeys(("use-checkpoint-args", "megatron-to-hf-mode"), _FROM_CHECKPOINT),
    **dict.fromkeys(("use-flash-attn", "use-mcore-models"), _OWN_LAYERS),
    **dict.fromkeys(("ckpt-format", "dist-ckpt-format", "use-dist-ckpt", "ckpt-fully-parallel-save"), _ONE_FORMAT),
    "dist-ckpt-strictness": f"{_ONE_FORMAT}, and one is loaded whole or refused with what is missing",
    "no-save-rng": "use --no-save-optim, which leaves both out",
    "freeze-all-layers": "use --freeze-params-name-list, with patterns of names",
    "num-layers-per-virtual-pipeline-stage": "use --virtual-pipeline-model-parallel-size, the stages of each rank",
    "yaml-cfg": "use --custom-config-path",
    "sglang-enable-deepep-moe": "drop it: --sglang-ep-size divides experts among the ranks of an engine",
    **dict.fromkeys(("log-interval", "timing-log-level", "log-throughput"), _ALWAYS_LOGGED),
    "recompute-activations": "use --recompute-granularity selective",
    "eval-iters": "drop it: an evaluation goes over its whole data set",
    "exit-interval": _STEPS,
    "exit-duration-in-mins": (
        "use --save DIR --save-interval N with --load DIR: a run that is ended goes on from its newest checkpoint"
    ),
    "sft": "use --loss-type sft_loss",
    "manual-gc": "drop it: training ranks leave it to Python when garbage is collected",
    "yarn-scaling-factor": _FROM_CHECKPOINT,
    "log-params-norm": "drop it: norms are logged of gradients, as train/grad_norm; parameters have none",
    "log-timers-to-tensorboard": "use --use-tensorboard: the times of every step are among the metrics, as perf/...",
    "nvtx-ranges": "use --use-pytorch-profiler, whose traces name the parts of a step",
    **dict.fromkeys(("profile", "use-memory-profiler"), "use --use-pytorch-profiler, or --record-memory-history"),
    "wandb-exp-name": _RUN_NAME,
    "wandb-save-dir": "use --wandb-dir",
    **dict.fromkeys(("nnodes", "num-nodes", "n-gpus-per-node", "nproc-per-node"), _NODES),
}

_VERL: Mapping[str, str] = {
    "data.train_files": _DATA,
    "data.val_files": _EVAL_DATA,
    "data.prompt_key": "use --input-key",
    "data.train_batch_size": _PROMPTS,
    "data.max_prompt_length": _PROMPT_LENGTH,
    "data.max_response_length": _RESPONSE,
    "data.shuffle": "use --rollout-shuffle",
    "algorithm.adv_estimator": _ESTIMATOR,
    "algorithm.kl_ctrl.kl_coef": "use --kl-coef",
    "algorithm.use_kl_in_reward": "use --kl-coef",
    "algorithm.norm_adv_by_std_in_grpo": _NORMALIZATION,
    "actor_rollout_ref.model.path": _MODEL,
    "actor_rollout_ref.model.lora_rank": _LORA,
    "actor_rollout_ref.model.enable_gradient_checkpointing": _RECOMPUTE,
    "actor_rollout_ref.actor.optim.lr": "use --lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size": f"{_OPTIMIZER_BATCH}; verl counts it in prompts",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "use --micro-batch-size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "use --use-dynamic-batch-size --max-tokens-per-gpu",
    "actor_rollout_ref.actor.use_dynamic_bsz": "use --use-dynamic-batch-size --max-tokens-per-gpu",
    "actor_rollout_ref.actor.ppo_epochs": _EPOCHS_OVER_BATCH,
    "actor_rollout_ref.actor.clip_ratio": _CLIP,
    "actor_rollout_ref.actor.clip_ratio_low": "use --eps-clip",
    "actor_rollout_ref.actor.clip_ratio_high": _CLIP_HIGH,
    "actor_rollout_ref.actor.use_kl_loss": "use --use-kl-loss",
    "actor_rollout_ref.actor.kl_loss_coef": "use --use-kl-loss --kl-loss-coef",
    "actor_rollout_ref.actor.kl_loss_type": "use --kl-loss-type",
    "actor_rollout_ref.actor.entropy_coeff": "use --entropy-coef",
    "actor_rollout_ref.actor.grad_clip": _CLIP_GRAD,
    "actor_rollout_ref.actor.loss_agg_mode": "use --loss-aggregation",
    "actor_rollout_ref.rollout.name": _ENGINE,
    "actor_rollout_ref.rollout.n": _GROUP,
    "actor_rollout_ref.rollout.temperature": "use --rollout-temperature",
    "actor_rollout_ref.rollout.gpu_memory_utilization": _ENGINE_MEMORY,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": _ENGINE_RANKS,
    "critic.optim.lr": "use --critic-lr",
    "custom_reward_function.path": "use --custom-rm-path path/to/file.py:fn",
    "trainer.total_epochs": _EPOCHS,
    "trainer.total_training_steps": _STEPS,
    "trainer.save_freq": _SAVE_EVERY,
    "trainer.test_freq": _EVAL_EVERY,
    "trainer.n_gpus_per_node": _TRAIN_RANKS,
    "trainer.nnodes": _NODES,
    "trainer.logger": _TRACKING,
    "trainer.project_name": _WANDB_PROJECT,
    "trainer.experiment_name": _RUN_NAME,
    "trainer.default_local_dir": _SAVE,
    "trainer.resume_mode": _LOAD,
    "trainer.val_before_train": "drop it: a first evaluation precedes training, without --skip-eval-before-train",
}

FOREIGN_NAMES: Mapping[str, str] = {**_GENERAL, **_OPENRLHF, **_MEGATRON, **_TRL, **REFUSED, **_VERL}
"""A flag without its dashes at the front, or a dotted name -> what to do, said after the name."""
