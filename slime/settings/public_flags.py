"""What flags of the public slime mean here, where that is something else: the tables of docs/migration.md.

`slime train --help public` prints them, and a test holds the document to them. A flag that is refused is answered from
here as well (`slime.settings.foreign_names`). What is not here is meant to mean the same in both.
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
