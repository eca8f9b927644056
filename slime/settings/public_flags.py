"""Flags and examples of the public slime: what each does here. And advice for flags of other programs.

`slime train --help public` prints the tables for the public slime, and a test compares docs/migration.md with them.
Each flag in `PUBLIC` is in one of the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from slime.settings.all_flags import flag_table
from slime.settings.fields import Need, declared, own_fields
from slime.settings.flags import Flag
from slime.settings.groups.launch_scripts import LaunchScriptSettings
from slime.settings.megatron import CONDITIONS, FIXED, UNSUPPORTED, need_of

DIFFERENT: Mapping[str, str] = {
    "`--hidden-size`, `--num-layers` and the model's other sizes, `--spec`, `--use-gated-attention`, "
    "`--post-mlp-layernorm`, `--use-rope-scaling`, `--model-name`": (
        "accepted if they agree with `config.json`, otherwise refused"
    ),
    "`--attention-backend`, `--transformer-impl`, `--moe-enable-deepep` and other Megatron flags": (
        "reported as having no effect, with the reason; refused with `--strict`"
    ),
    "`--moe-router-dtype fp32`": (
        "router logits in float32, even if the model uses a different dtype; engines keep their dtype, and the "
        "mismatch is measured"
    ),
    "`--ref-load X`": ("the trainer's initial weights, and the reference: a folder in Hugging Face format"),
    "`--ref-load X_torch_dist`, also for `--load`, `--critic-load`, `--opd-teacher-load`": (
        "the Hugging Face folder `X`, whether `X_torch_dist` exists or not; without `X`, `--hf-checkpoint` (for "
        "`--ref-load` and `--load`). slime reports this in one line at startup. If Megatron trained the "
        "weights, the folder is refused: `slime convert X_torch_dist OUT --hf-checkpoint MODEL --trust-pickle` "
        "([checkpoints](checkpoints.md#megatrons-torch_dist))"
    ),
    "`--load X`": (
        "a slime checkpoint, or a folder in Hugging Face format, which takes precedence over `--ref-load`. With a "
        "folder that does not exist or is empty, the run starts at step 0, and reports this in one line unless the "
        "folder is also the `--save` folder"
    ),
    "`--save X`": (
        "slime's own checkpoints. Use `--save-hf` for Hugging Face folders, and `slime convert X OUT --to torch_dist` "
        "for Megatron"
    ),
    "a tool that converts to or from `torch_dist`": "`slime convert`, which needs no GPUs or ranks",
    "a model flag given twice, such as `--rotary-base` in both a model's file and the script": (
        "the last one counts, and the earlier one is reported as replaced; other flags with two values are refused"
    ),
    "`--wandb-key` with an empty variable": (
        "the login from `WANDB_API_KEY` or `wandb login`; without one, `--wandb-mode offline`"
    ),
    "`--ci-train-rollout-logprob-abs-diff-threshold` with `--ci-test`": "the default of `--mismatch-limit`",
    "`--sglang-router-request-timeout-secs`": "same as `--router-request-timeout-secs`",
    "`--rm-url` as an SGLang teacher, with `--rollout-temperature` other than 1": (
        "the teacher's log-probs are at temperature 1, and the student's at its sampling temperature; slime warns "
        "about this at startup"
    ),
    "`--use-kl-loss` with coefficient 0 together with `--rollout-top-p` or `--rollout-top-k`": (
        "reported as having no effect"
    ),
    "`--save-debug-rollout-data X.pt`": (
        "the same path, but ending in `.jsonl.zst` (`.npz` for `--save-debug-train-data`), without pickles"
    ),
    "`--load-debug-rollout-data X.pt`": (
        "convert each file first: `slime convert X.pt X.jsonl.zst --trust-pickle` "
        "([recorded data](reproducibility.md#half-a-run))"
    ),
    "`--multimodal-keys`": (
        '`{"image": COLUMN}`, or `{}` for agents alone, with a dense Qwen3-VL; the tower is frozen, videos and audio '
        "are refused ([vision.md](vision.md))"
    ),
    "`--eval-prompt-data FILE`": "a dataset named aime",
    "`--eval-config` with keys that name no setting": "listed as read by nothing, or refused if one is similar",
    "`--eval-prompt-data` without `--eval-interval`": "reported as having no effect",
    "`--eval-prompt-data` under `--loss-type sft_loss`": "the held-out loss",
    "`--custom-config-path` with a key that a flag sets to another value": (
        "refused, because only one of them would count; drop one, or put `--override` before the flag"
    ),
    "`--custom-config-path` with keys that name no setting": (
        "your own settings, available as `args.name` if the run uses a function of your own; the run lists them when "
        "it starts"
    ),
    "`--megatron-config-path`": (
        "settings of one role; shared settings, such as parallel sizes, must equal the run's. The critic's `load` is "
        "`--critic-load`"
    ),
    "`--balance-by-flops`": "same as `--balance-data`, which always balances by FLOPs",
    "`--disable-rollout-global-dataset`": "same as leaving out `--prompt-data`",
    "`--recompute-activations`": "same as `--recompute-granularity selective`",
    "`--num-layers-per-virtual-pipeline-stage`": "determines `--virtual-pipeline-model-parallel-size`",
    "`--num-epoch` with `--num-rollout`": "reported as having no effect, because `--num-rollout` sets the length",
    "`--over-sampling-batch-size` with `--fully-async`": "reported as having no effect",
    "`--eps-clip` of 1 or more": "no lower bound for the ratio, which is never negative",
    "`--kl-loss-type`": "the default is low_var_kl; k1 with a coefficient is refused",
    "`--kl-coef`": "takes effect with every estimator",
    "`--actor-num-gpus-per-node`": "the default is 1",
    "`--rollout-max-response-len`": (
        "the default is 1024; it limits each response, as in the public slime; `--rollout-max-total-response-len` "
        "limits an entire execution"
    ),
    "`--rollout-max-context-len`, `--eval-max-context-len`": (
        "also limit generation: a response ends when its conversation reaches this length"
    ),
    "`--log-probs-chunk-size`": "the default is 1024",
    "`--rollout-health-check-interval`": "the default is 5 s, not 30; processes are also checked every second",
    "`--use-fault-tolerance`": "on by default; with `--no-use-fault-tolerance`, the run fails when an engine exits",
    "`--check-weight-update-equal`": "always on: every weight sync is verified, and the `--no-` form is refused",
    "`--use-tis` with `--fully-async`": (
        "on by default for the policy loss, unless `--use-rollout-logprobs`, `--rejection-level` or a list of "
        "corrections replaces it"
    ),
    "`--qwen-gdn-backend`": (
        "the default is auto: fla if its kernels are installed and can run, otherwise slime's own kernels on a GPU; "
        "torch is plain PyTorch, and flashqla is the same as auto"
    ),
    "`--global-batch-size` that does not divide the executions of a rollout": (
        "refused, because some executions would never be trained, and slime drops nothing"
    ),
    "`--offload`, `--offload-train`, `--offload-rollout` without `--colocate`": (
        "reported as having no effect, because nothing else needs the memory"
    ),
    "`--n-samples-per-prompt 1` with normalised rewards": "refused, because every advantage would be zero",
    "`--update-weights-interval` and `--keep-old-actor` in train.py": (
        "reported as having no effect: every step syncs, and trains on the weights that sampled it"
    ),
    "`--keep-old-actor` with `--fully-async`": (
        "refused, because several weight versions sample a batch; use `--use-tis` or `--use-rollout-logprobs`"
    ),
    "`--update-weight-transport nccl`": (
        "distributed; for engines that share GPUs with the trainer, shared memory (tensor or mixed)"
    ),
    "`--custom-loss-function-path`": (
        "with `--custom-loss-logits`, gets the logits `[1, T, V]` and the public batch: `advantages`, `returns`, "
        "`log_probs`, `ref_log_probs`, `rollout_log_probs` and `values` are lists with one tensor per sample. A "
        "function with a parameter named `logits` is refused without this flag. By default, a function gets log-probs, "
        "and these fields are flat tensors ([customization.md](customization.md#fields-of-the-batch))"
    ),
    "`--custom-rm-path`": (
        "called in a separate process with one sample at a time, even for a fan-out (with `--group-rm`: all samples "
        "of a prompt); `--reward-timeout-s` limits each call"
    ),
    "`--rollout-all-samples-process-path`": (
        "the third argument is the data source; calling it, as in the public slime, or its `get_samples` returns groups"
    ),
    "`--rollout-data-postprocess-path`": (
        "only changes to `advantages` and `returns` take effect; changed tokens, masks or log-probs end the run. Give "
        "tokens that must not be trained an advantage of 0"
    ),
    "`--mtp-loss-scaling-factor`": "the default is 0.1",
    "`--normalize-advantages`": "on by default with `reinforce_plus_plus` and `reinforce_plus_plus_baseline`",
    "`--profile-target`, `--memory-snapshot-dir`": (
        "traces, and by default snapshots, are written to the run folder; all three targets are supported; `rollout` "
        "is an additional target"
    ),
    "`--sglang-router-ip`, `--sglang-router-port`": "the router must require a key, `--router-api-key`",
    "`--rollout-external-engine-addrs`": (
        "the run contacts engines when it starts, not while it parses flags. Engines need a few flags "
        "([serving_topology.md](serving_topology.md#engines-that-run-already)), and can join, leave, exit and come back"
    ),
}
"""Flags as written in a script -> what they do here, and why. In the order of docs/migration.md."""

_PUBLIC = """
accumulate-allreduce-grads-in-fp32 actor-num-gpus-per-node actor-num-nodes adam-beta1 adam-beta2 add-qkv-bias
advantage-estimator allgather-cp apply-chat-template apply-chat-template-kwargs apply-layernorm-1p async-save
attention-backend attention-dropout attention-output-gate attention-softmax-in-fp32 balance-by-flops balance-data bf16
buffer-filter-path calculate-per-token-loss check-weight-update-equal ci-disable-kl-checker ci-load-grad-norm
ci-save-grad-norm ci-test ci-train-rollout-logprob-abs-diff-threshold ckpt-fully-parallel-save clip-grad colocate
context-parallel-size custom-advantage-function-path custom-config-path custom-convert-samples-to-train-data-path
custom-eval-rollout-log-function-path custom-generate-function-path custom-loss-function-path
custom-megatron-before-log-prob-hook-path custom-megatron-before-train-step-hook-path custom-megatron-init-path
custom-model-provider-path custom-pg-loss-reducer-function-path custom-reward-post-process-path custom-rm-path
custom-rollout-log-function-path custom-tis-function-path custom-update-weight-post-write-path
data-pad-size-multiplier data-source-path debug-rollout-only debug-train-only decoder-last-pipeline-num-layers
deterministic-mode disable-bias-linear disable-compute-advantages-and-returns disable-grpo-std-normalization
disable-rewards-normalization disable-rollout-global-dataset disable-wandb-random-suffix dist-ckpt-format
distributed-backend distributed-timeout-minutes dump-details dynamic-sampling-filter-path enable-experimental
enable-mtp-training entropy-coef eps-clip eps-clip-c eps-clip-high eval-config eval-function-path eval-input-key
eval-interval eval-label-key eval-max-context-len eval-max-prompt-len eval-max-response-len eval-min-new-tokens
eval-prompt-data eval-reward-key eval-temperature eval-tool-key eval-top-k eval-top-p expert-model-parallel-size
expert-tensor-parallel-size fetch-trajectory-retry-times ffn-hidden-size fp8-format fp8-recipe freeze-all-layers
freeze-indexer freeze-params-name-list fully-async gamma get-mismatch-metrics global-batch-size group-query-attention
group-rm hf-checkpoint hidden-dropout hidden-size http-proxy input-key keep-old-actor kl-coef kl-loss-coef
kl-loss-type kv-channels kv-lora-rank label-key lambd load load-debug-rollout-data load-debug-rollout-data-subsample
load-forge-rollout-data log-correct-samples log-multi-turn log-passrate log-probs-chunk-size
log-probs-max-tokens-per-gpu log-reward-category loss-mask-type loss-type lr lr-decay-style lr-warmup-fraction
make-vocab-size-divisible-by mask-offpolicy-in-partial-rollout max-position-embeddings max-tokens-per-gpu
megatron-config-path megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules
megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules megatron-server-max-length
megatron-server-update-timeout-s megatron-server-warmup memory-recorder memory-snapshot-dir memory-snapshot-num-steps
metadata-key micro-batch-size min-batch-collection-ratio min-lr model-name moe-aux-loss-coeff moe-enable-deepep
moe-ffn-hidden-size moe-grouped-gemm moe-layer-freq moe-permute-fusion moe-router-bias-update-rate moe-router-dtype
moe-router-enable-expert-bias moe-router-group-topk moe-router-load-balancing-type moe-router-num-groups
moe-router-pre-softmax moe-router-score-function moe-router-topk moe-router-topk-scaling-factor moe-shared-expert-gate
moe-shared-expert-intermediate-size moe-token-dispatcher-type moe-token-drop-policy mscale mscale-all-dim
mtp-loss-scaling-factor mtp-num-layers multi-latent-attention multimodal-keys n-samples-per-eval-prompt
n-samples-per-prompt no-check-for-nan-in-loss-and-grad no-offload-rollout no-offload-train no-position-embedding
no-qk-layernorm no-rope-fusion no-save-optim no-save-rng norm-epsilon normalization normalize-advantages
num-attention-heads num-critic-only-steps num-epoch num-experts num-gpus-per-node num-layers
num-layers-per-virtual-pipeline-stage num-query-groups num-rollout num-steps-per-rollout offload offload-rollout
offload-train only-train-params-name-list opd-kl-coef opd-teacher-ckpt-step opd-teacher-load opd-teacher-url opd-type
opsm-delta optimizer optimizer-cpu-offload over-sampling-batch-size overlap-cpu-optimizer-d2h-h2d padded-vocab-size
partial-rollout persist-layer-norm pipeline-model-parallel-size position-embedding-type post-mlp-layernorm
post-self-attn-layernorm prefill-num-servers profile-target prompt-data q-lora-rank qk-head-dim qk-layernorm
qk-pos-emb-head-dim qwen-gdn-backend recompute-activations recompute-granularity recompute-loss-function
recompute-method recompute-num-layers record-memory-history ref-ckpt-step ref-load ref-micro-batch-size
ref-update-interval release-train reset-optimizer-states reward-key reward-num-workers rm-type rm-url
rollout-all-samples-process-path rollout-batch-size rollout-buffer-url rollout-data-postprocess-path
rollout-data-transport rollout-external-engine-addrs rollout-function-path rollout-health-check-first-wait
rollout-health-check-interval rollout-health-check-timeout rollout-max-context-len rollout-max-prompt-len
rollout-max-response-len rollout-num-gpus rollout-num-gpus-per-engine rollout-sample-filter-path
rollout-sample-hook-path rollout-seed rollout-shuffle rollout-skip-special-tokens rollout-stop rollout-stop-token-ids
rollout-task-type rollout-temperature rollout-top-k rollout-top-p rotary-base rotary-interleaved rotary-percent
rotary-scaling-factor save save-debug-rollout-data save-debug-train-data save-hf save-interval seed seq-length
sequence-parallel sglang-attention-backend sglang-chunked-prefill-size sglang-config sglang-cp-strategy
sglang-cuda-graph-bs sglang-cuda-graph-max-bs sglang-custom-pull-weights-pre-read-hook sglang-deepep-config
sglang-deepep-mode sglang-dp-size sglang-enable-deepep-moe sglang-enable-dp-attention sglang-enable-dp-lm-head
sglang-enable-strict-thinking sglang-ep-size sglang-expert-parallel-size sglang-mamba-scheduler-strategy
sglang-max-running-requests sglang-mem-fraction-static sglang-moe-a2a-backend sglang-moe-dense-tp-size
sglang-nsa-decode-backend sglang-nsa-prefill-backend sglang-page-size sglang-reasoning-parser sglang-router-ip
sglang-router-port sglang-router-request-timeout-secs sglang-served-model-name sglang-server-concurrency
sglang-speculative-algorithm sglang-speculative-eagle-topk sglang-speculative-num-draft-tokens
sglang-speculative-num-steps sglang-tool-call-parser sglang-watchdog-timeout skip-eval-before-train spec
start-rollout-id swiglu tb-experiment-name tb-project-name teacher-label-reduction-chunk-size teacher-port
teacher-sample-reduction-chunk-size teacher-warmup-port teacher-warmup-timeout-s tensor-model-parallel-size tis-clip
tis-clip-low tool-key train-backend train-env-vars transformer-impl untie-embeddings-and-output-weights
update-weight-buffer-size update-weight-delta-checksum update-weight-delta-encoding update-weight-disk-dir
update-weight-disk-keep-files update-weight-local-checkpoint-dir update-weight-mode update-weight-transport
update-weights-interval use-dist-ckpt use-distributed-post use-dynamic-batch-size use-fault-tolerance use-flash-attn
use-gated-attention use-kitchen-attention use-kl-loss use-opd use-opsm use-precision-aware-optimizer
use-rollout-entropy use-rollout-logprobs use-rollout-routing-replay use-rope-scaling use-rotary-position-embeddings
use-routing-replay use-stateless-adam use-tensorboard use-tis use-unbiased-kl use-wandb v-head-dim value-clip
vocab-size wandb-always-use-train-step wandb-dir wandb-group wandb-host wandb-key wandb-mode wandb-project
wandb-run-id wandb-team weight-decay yaml-cfg
"""
PUBLIC = tuple(_PUBLIC.split())
"""All flags of the public slime and of its launch scripts, without leading dashes, in alphabetical order."""

_MODEL = """
add-qkv-bias apply-layernorm-1p attention-output-gate disable-bias-linear ffn-hidden-size group-query-attention
kv-channels kv-lora-rank max-position-embeddings moe-ffn-hidden-size moe-layer-freq moe-router-enable-expert-bias
moe-router-group-topk moe-router-num-groups moe-router-pre-softmax moe-router-score-function moe-router-topk
moe-router-topk-scaling-factor moe-shared-expert-gate moe-shared-expert-intermediate-size multi-latent-attention
no-qk-layernorm norm-epsilon num-attention-heads num-experts num-query-groups position-embedding-type q-lora-rank
qk-head-dim qk-layernorm qk-pos-emb-head-dim rotary-interleaved rotary-percent swiglu
untie-embeddings-and-output-weights v-head-dim vocab-size
"""
MODEL = tuple(_MODEL.split())
"""Flags of Megatron that describe the model, as config.json does."""

_STARTS = "starts as it is"
EXAMPLES: Mapping[str, str] = {
    **dict.fromkeys(("coding_agent_rl", "eval_multi_task", "fully_async", "retool", "rollout_buffer"), _STARTS),
    **dict.fromkeys(("strands_sglang", "train_infer_mismatch_helper"), _STARTS),
    "on_policy_distillation": (
        "the script with a Megatron teacher starts as it is; so does a script of the form of the one with a served "
        "teacher"
    ),
    "geo3k_vlm": "refused for its model, a Qwen3.5 with images; a dense Qwen3-VL can be trained",
    "geo3k_vlm_multi_turn": (
        "refused for a Qwen3.5 with images, and for a Qwen3-VL on several tensor-parallel ranks; with a dense Qwen3-VL "
        "on one rank per replica, a plugin of its kind trains as it is"
    ),
    **dict.fromkeys(
        ("multi_agent", "tau-bench"), "a script of its form starts as it is, and a plugin of its kind trains as it is"
    ),
    "search-r1": (
        "a script of its form starts as it is, and a plugin of its kind trains as it is if it posts token ids; "
        "executions whose posted text encodes to other ids fail one by one"
    ),
    "delta_weight_sync": "a script of its form starts as it is ([delta_sync.md](delta_sync.md))",
}
"""Examples of the public slime -> what becomes of their launch scripts."""

_INSTEAD_OF_REFUSED = {
    "use --model-family with your own family: a model that only the trainer can build cannot be served, saved or "
    "exported": "custom-model-provider-path",
    "use --load-debug-rollout-data, which replays rollouts without engines": "load-forge-rollout-data",
    "use --adam-beta1 0 --adam-beta2 0, which give the same update; --use-precision-aware-optimizer and "
    "--optimizer-cpu-offload reduce the memory of the state": "use-stateless-adam",
    "use --opd-teacher-url with an SGLang server that serves the teacher, or --opd-type megatron": (
        "teacher-port teacher-warmup-port teacher-warmup-timeout-s teacher-label-reduction-chunk-size "
        "teacher-sample-reduction-chunk-size megatron-server-max-length megatron-server-update-timeout-s "
        "megatron-server-warmup"
    ),
}
"""Advice -> refused flags of the public slime, without leading dashes."""

_INSTEAD_OF_FOREIGN = {
    "use --hf-checkpoint DIR, a folder in Hugging Face format": (
        "model model-path base-model checkpoint pretrain model-name-or-path actor_rollout_ref.model.path"
    ),
    "use --prompt-data FILE, a .jsonl or .parquet file, with --input-key and --label-key for its columns": (
        "data dataset data-path train-data train-file train-files train-data-path valid-data-path split num-workers "
        "dataset-name dataset-path data.train_files"
    ),
    "use --eval-prompt-data NAME FILE, and --eval-interval": (
        "eval-data eval-dataset val-data test-data val-files val-file data.val_files"
    ),
    "use --rollout-batch-size for the prompts per step, --global-batch-size for the samples per optimizer step "
    "(all devices together), and --micro-batch-size or --max-tokens-per-gpu for a forward pass": (
        "batch-size train-batch-size mini-batch-size per-device-train-batch-size"
    ),
    "use --num-epoch, or --num-rollout for a number of steps": (
        "epochs num-epochs max-epochs total-epochs n-epochs num-episodes num-train-epochs trainer.total_epochs"
    ),
    "use --num-rollout; each step has --num-steps-per-rollout optimizer steps": (
        "steps num-steps max-iters iterations total-steps exit-interval max-steps trainer.total_training_steps"
    ),
    "use --n-samples-per-prompt, the number of samples per prompt": (
        "group-size num-samples n-samples samples-per-prompt num-generations actor_rollout_ref.rollout.n"
    ),
    "use --lr-decay-style: constant, linear, cosine, inverse-square-root or WSD": (
        "lr-scheduler scheduler schedule lr-scheduler-type"
    ),
    "use --lr-warmup-fraction, or --lr-warmup-iters for a number of optimizer steps": (
        "warmup num-warmup-steps warmup-ratio warmup-steps"
    ),
    "use --clip-grad": (
        "grad-clip clip-grad-norm gradient-clipping max-norm max-grad-norm actor_rollout_ref.actor.grad_clip"
    ),
    "use --eps-clip, and --eps-clip-high for the upper bound": (
        "clip-ratio clip-range cliprange clip-eps eps-clip-low-high epsilon actor_rollout_ref.actor.clip_ratio"
    ),
    "use --kl-coef for a penalty in the reward, or --use-kl-loss --kl-loss-coef for a loss term": (
        "kl-beta kl-penalty kl-loss-weight init-kl-coef beta"
    ),
    "use --rollout-max-response-len for the tokens per response (--rollout-max-total-response-len: of all turns)": (
        "max-tokens max-new-tokens max-response-len max-response-length generate-max-len max-completion-length "
        "data.max_response_length"
    ),
    "use --rollout-max-prompt-len, in tokens; longer prompts are dropped, not truncated": (
        "max-prompt-len max-input-length prompt-max-len max-prompt-length data.max_prompt_length"
    ),
    "use --rollout-max-context-len for prompt and response together": "max-len max-seq-len max-model-len max-length",
    "use --rm-type NAME for a built-in grader, or --custom-rm-path pkg.mod:fn for your own function": (
        "reward reward-fn reward-function reward-path rm-path verifier reward-pretrain reward-funcs reward-model-path"
    ),
    "use --save DIR for checkpoints, --save-hf DIR for an export, --run-dir DIR for metrics and logs": (
        "save-dir checkpoint-dir out-dir output save-path output-dir trainer.default_local_dir"
    ),
    "use --save-interval, in steps, with --save DIR": "save-every save-freq save-steps save-strategy trainer.save_freq",
    "use --eval-interval, in steps": (
        "eval-every eval-freq test-freq eval-steps eval-strategy do-eval trainer.test_freq"
    ),
    "use --load DIR, the --save folder of the run to continue": (
        "resume resume-from load-path load-checkpoint resume-from-checkpoint trainer.resume_mode"
    ),
    "use --use-wandb or --use-tensorboard; metrics.jsonl and the console are always written": (
        "logger log-with wandb tensorboard report-to trainer.logger"
    ),
    "use --wandb-project": "project-name project trainer.project_name",
    "use --wandb-group, and --run-dir for the run's folder": (
        "experiment-name exp-name wandb-exp-name run-name trainer.experiment_name"
    ),
    "use --actor-num-gpus-per-node (on a CPU: the number of ranks), and --rollout-num-gpus, with "
    "--rollout-num-gpus-per-engine for the size of an engine": "gpus num-gpus n-gpus world-size",
    "use --bf16 (the default), --fp16 or --no-bf16; the engines serve in the same dtype": (
        "dtype precision mixed-precision torch-dtype"
    ),
    "use --tensor-model-parallel-size and, for an engine, --rollout-num-gpus-per-engine": "tp tp-size",
    "use --pipeline-model-parallel-size": "pp pp-size",
    "use --expert-model-parallel-size": "ep ep-size",
    "use --context-parallel-size": "cp cp-size",
    "use --advantage-estimator": "algorithm algo adv-estimator algorithm.adv_estimator",
    "use --rollout-temperature (evaluation: --eval-temperature)": "temperature sampling-temperature",
    "use --rollout-top-p (evaluation: --eval-top-p)": "top-p",
    "use --rollout-top-k (evaluation: --eval-top-k)": "top-k",
    "use --rollout-shuffle": "shuffle data.shuffle",
    "drop it: the tokenizer comes from --hf-checkpoint": "tokenizer tokenizer-name-or-path",
    "use --ref-load DIR": "ref-model",
    "use --global-batch-size for the samples per optimizer step (all devices together), and --micro-batch-size or "
    "--max-tokens-per-gpu for a forward pass": "micro-train-batch-size",
    "drop it: the engines batch requests themselves": "micro-rollout-batch-size",
    "use --lr": "actor-learning-rate learning-rate actor_rollout_ref.actor.optim.lr",
    "use --critic-lr": "critic-learning-rate critic.optim.lr",
    "use --rm-type remote_rm --rm-url URL": "remote-rm-url",
    "use --save DIR": "ckpt-path",
    "use --rollout-num-gpus, with --rollout-num-gpus-per-engine for the size of an engine": "vllm-num-engines",
    "use --colocate: training and engines share the GPUs": "colocate-all-models",
    "use --actor-num-gpus-per-node (on a CPU: the number of ranks)": (
        "actor-num-gpus actor-num-gpus-per-actor trainer.n_gpus_per_node"
    ),
    "drop it: samples are always packed without padding": "packing-samples packing",
    "use --num-rollout, or --num-epoch": "train-samples",
    "use --lr-warmup-iters and --lr-decay-iters": "lr-warmup-samples lr-decay-samples",
    "drop it: config.json has the value": "use-checkpoint-args megatron-to-hf-mode yarn-scaling-factor",
    "drop it: the trainer has its own attention": "attn-implementation",
    "drop it: loading fails if the checkpoint lacks an entry": "dist-ckpt-strictness",
    "use --freeze-params-name-list with name patterns": "freeze-all-layers",
    "use --custom-config-path": "yaml-cfg",
    "drop it: --sglang-ep-size distributes experts over the ranks of an engine": "sglang-enable-deepep-moe",
    "drop it: every step is logged": "logging-steps",
    "drop it: an evaluation covers its entire dataset": "eval-iters",
    "use --loss-type sft_loss": "sft",
    "drop it: training ranks use Python's automatic garbage collection": "manual-gc",
    "drop it: only the gradient norm is logged, as train/grad_norm": "log-params-norm",
    "use --use-tensorboard: the timings of every step are logged as perf/...": "log-timers-to-tensorboard",
    "use --use-pytorch-profiler, whose traces label the phases of a step": "nvtx-ranges",
    "use --use-pytorch-profiler, or --record-memory-history": "profile use-memory-profiler",
    "use --wandb-dir": "wandb-save-dir",
    "use --actor-num-nodes for the training hosts, and --actor-num-gpus-per-node for the GPUs per host": (
        "nnodes num-nodes n-gpus-per-node nproc-per-node trainer.nnodes"
    ),
    "drop it: the engines batch evaluation requests themselves": "per-device-eval-batch-size",
    "use --global-batch-size for the samples per optimizer step (all devices together), and --micro-batch-size or "
    "--max-tokens-per-gpu for a forward pass; gradient accumulation follows from them": "gradient-accumulation-steps",
    "use --rollout-batch-size for the prompts per step, and --n-samples-per-prompt for the samples per prompt": (
        "generation-batch-size"
    ),
    "use --num-steps-per-rollout: optimizer steps per generated batch, each on different samples": (
        "steps-per-generation num-iterations actor_rollout_ref.actor.ppo_epochs"
    ),
    "use --eps-clip-high": "epsilon-high actor_rollout_ref.actor.clip_ratio_high",
    "use --eps-clip-c, the bound of dual clipping": "delta",
    "use --disable-grpo-std-normalization to omit the division by the standard deviation": (
        "scale-rewards algorithm.norm_adv_by_std_in_grpo"
    ),
    "use --adam-eps": "adam-epsilon",
    "drop it: the optimizer is Adam": "optim",
    "use --lora-rank N, which also enables adapters": "use-peft use-lora lora-r actor_rollout_ref.model.lora_rank",
    "drop it: adapters are trained without dropout, so that the engines compute the same model": "lora-dropout",
    "drop it: weights are trained in --bf16, --fp16 or float32": "load-in-4bit load-in-8bit",
    "use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1": (
        "gradient-checkpointing actor_rollout_ref.model.enable_gradient_checkpointing"
    ),
    "use --ref-update-interval, in steps": "sync-ref-model ref-model-sync-steps",
    "drop it: SGLang is the only engine; --help sglang lists its settings": (
        "use-vllm vllm-mode vllm-server-host vllm-server-port actor_rollout_ref.rollout.name"
    ),
    "use --sglang-mem-fraction-static": "vllm-gpu-memory-utilization actor_rollout_ref.rollout.gpu_memory_utilization",
    "use --rollout-num-gpus-per-engine": (
        "vllm-tensor-parallel-size actor_rollout_ref.rollout.tensor_model_parallel_size"
    ),
    "use --sglang-context-length": "vllm-max-model-length",
    "drop it: slime trains only models that it implements itself": "trust-remote-code",
    "drop it: the distributed optimizer already shards its state; see also --tensor-model-parallel-size": (
        "deepspeed fsdp fsdp-config zero-stage"
    ),
    "use --run-dir DIR": "logging-dir",
    "use --save-keep-last": "save-total-limit",
    "drop it: train.py always trains, except with --num-rollout 0, which only evaluates": "do-train",
    "use --input-key": "data.prompt_key",
    "use --rollout-batch-size, counted in prompts per step": "data.train_batch_size",
    "use --kl-coef": "algorithm.kl_ctrl.kl_coef algorithm.use_kl_in_reward",
    "use --global-batch-size for the samples per optimizer step (all devices together), and --micro-batch-size or "
    "--max-tokens-per-gpu for a forward pass; verl counts it in prompts": (
        "actor_rollout_ref.actor.ppo_mini_batch_size"
    ),
    "use --micro-batch-size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "use --use-dynamic-batch-size --max-tokens-per-gpu": (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu actor_rollout_ref.actor.use_dynamic_bsz"
    ),
    "use --eps-clip": "actor_rollout_ref.actor.clip_ratio_low",
    "use --use-kl-loss": "actor_rollout_ref.actor.use_kl_loss",
    "use --use-kl-loss --kl-loss-coef": "actor_rollout_ref.actor.kl_loss_coef",
    "use --kl-loss-type": "actor_rollout_ref.actor.kl_loss_type",
    "use --entropy-coef": "actor_rollout_ref.actor.entropy_coeff",
    "use --loss-aggregation": "actor_rollout_ref.actor.loss_agg_mode",
    "use --rollout-temperature": "actor_rollout_ref.rollout.temperature",
    "use --custom-rm-path path/to/file.py:fn": "custom_reward_function.path",
    "drop it: a run evaluates before training, unless --skip-eval-before-train is set": "trainer.val_before_train",
}
"""Advice -> flags of other programs (TRL, OpenRLHF, Megatron-LM), without leading dashes, and verl's dotted names."""


def _by_name(answers: Mapping[str, str]) -> dict[str, str]:
    return {name: answer for answer, names in answers.items() for name in names.split()}


REFUSED: Mapping[str, str] = _by_name(_INSTEAD_OF_REFUSED)
FOREIGN_NAMES: Mapping[str, str] = {**REFUSED, **_by_name(_INSTEAD_OF_FOREIGN)}
"""Flag of another program -> advice, for messages about unknown flags.

None of these names is accepted as an alias, because many have a slightly different meaning (a batch size per device, a
penalty in the reward) that would go unnoticed. The advice states the difference.
"""


def tables() -> str:
    """Returns Markdown tables: each public flag is in one of the first four, each example in the last."""
    parts = [
        "These flags are accepted, but have a different or additional meaning:",
        _table(("in a script", "in slime"), list(DIFFERENT.items())),
        "These flags are accepted but reported as having no effect; `--strict` refuses them:",
        _table(("in a script", "why"), list(_without_effect())),
        "These flags are refused, with a message that says what to do:",
        refused_table(),
        "All other flags of the public slime and of its launch scripts:",
        _table(("flag", "in slime"), list(_others())),
        "The launch scripts of the public examples:",
        _table(("example", "in slime"), list(_named(EXAMPLES))),
    ]
    return "\n\n".join(parts)


_FLAG = re.compile(r"--([a-z][a-z0-9-]*[a-z0-9])")


def _others() -> Iterator[tuple[str, str]]:
    """Yields (flags, what they do) of the public flags that the other tables lack."""
    listed = {name for row in (*DIFFERENT, *(flags for flags, _ in _without_effect())) for name in _FLAG.findall(row)}
    known = flag_table().by_name
    said: dict[str, str] = {}
    for name in PUBLIC:
        if name not in listed and name not in FOREIGN_NAMES:
            flag, value = known[f"--{name}"]
            said[name] = _of_megatron(flag, name, value) if flag.owner == "megatron" else _same(flag)
    yield from sorted(_grouped(said), key=lambda row: not row[1].startswith("the same"))


def _named(rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Joins the rows with the same text."""
    for text in dict.fromkeys(rows.values()):
        yield ", ".join(name for name, said in rows.items() if said == text), text


def _same(flag: Flag) -> str:
    if flag.group == "Hooks":
        return "the same: your function is called with the same arguments"
    return "the same: passed to the engines" if flag.owner == "sglang" else "the same"


def _of_megatron(flag: Flag, name: str, value: bool) -> str:
    """`value`: what the name sets, if the flag is a switch."""
    if name in MODEL:
        return "accepted if it agrees with `config.json`, otherwise refused"
    fixed = FIXED.get(flag.dest) or UNSUPPORTED.get(flag.dest)
    if fixed is None:
        return "the same, in Megatron-core"
    only, reason = fixed
    if flag.kind == "bool":
        if value == only:
            return f"always set; the opposite {reason}" if reason.startswith("needs") else f"always set: {reason}"
        return f"refused: {reason}"
    return f"refused: {reason}" if only is None else f"only {only}: {reason}"


def refused_table() -> str:
    answers = {name: FOREIGN_NAMES[name] for name in (*REFUSED, *PUBLIC) if name in FOREIGN_NAMES}
    return _table(("flag", "what to do"), list(_grouped(answers)))


def _without_effect() -> Iterator[tuple[str, str]]:
    declarations = {field.name.replace("_", "-"): declared(field) for field in own_fields(LaunchScriptSettings)}
    needs = {name: says.conditions[0] for name, says in declarations.items() if says.conditions}
    never = {name: need for name in PUBLIC if name not in MODEL and (need := _never_acts(name)) is not None}
    yield from _grouped({name: need.clause.removeprefix("which ") for name, need in (needs | never).items()})


def _never_acts(name: str) -> Need | None:
    """Returns the condition of a flag of Megatron that this trainer never meets, or None."""
    flag, value = flag_table().by_name.get(f"--{name}", (None, True))
    if flag is None or flag.owner != "megatron" or flag.dest in CONDITIONS or f"--{name}`" in "".join(DIFFERENT):
        return None
    if flag.kind == "bool" and FIXED.get(flag.dest, (None,))[0] == value:
        return None
    return need_of(flag.dest)


def _grouped(answers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields one row (flags, advice) for each distinct advice."""
    for answer in dict.fromkeys(answers.values()):
        flags = ", ".join(f"`--{name}`" for name, text in answers.items() if text == answer)
        yield flags, answer


def _table(heads: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [heads, ("---", "---"), *rows]
    return "\n".join(f"| {left} | {right} |".replace("| --- | --- |", "|---|---|") for left, right in lines)
