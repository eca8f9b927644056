"""Names that other programs give a setting, and how it is written here: for messages about unknown flags only.

None of them is taken: a name that means almost the same (a batch counted per device, a penalty inside the reward) would
be a silent difference. Where the meaning differs, the answer says how.
"""

from __future__ import annotations

from collections.abc import Mapping

from slime.settings.public_flags import REFUSED

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
