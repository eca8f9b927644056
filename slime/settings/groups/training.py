"""How samples become optimizer steps and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from slime.settings.fields import derived, opt


@dataclass(frozen=True, kw_only=True)
class TrainingArgs:
    """Batching, seed and the trainer's self-checks. Model, optimizer and schedule are Megatron's own flags."""

    global_batch_size: int = derived()
    """Executions (prompts x samples) per optimizer step. Default: those of a
    rollout // num_steps_per_rollout."""
    num_steps_per_rollout: int = derived()
    """Optimizer steps per generated batch. Default: 1, or what global_batch_size implies."""
    micro_batch_size: int = 1
    """Samples per forward pass, packed without padding."""
    use_dynamic_batch_size: bool = False
    """Fill micro-batches up to max_tokens_per_gpu instead."""
    max_tokens_per_gpu: int | None = None
    """Most tokens in a micro-batch with --use-dynamic-batch-size."""
    use_dynamic_global_batch_size: bool = False
    """Train whatever number of executions a rollout has, in num_steps_per_rollout steps of nearly equal size."""
    balance_data: bool = False
    """Spread samples over data-parallel ranks by the floating-point operations that they cost."""
    log_probs_chunk_size: int = 1024
    """Tokens whose full-vocabulary logits exist at one time; -1 means all."""
    seed: int = 1234
    """Seed of initialisation and dropout."""
    model_family: str | None = None
    """A model family of your own, registered for the checkpoint's model_type: pkg.module, path/to/file.py or
    pkg.module:ClassName. None: slime's own families."""
    qwen_gdn_backend: str = opt("auto", choices=("auto", "fla", "torch"))
    """Linear attention of Qwen3-Next and Qwen3.5: kernels of flash-linear-attention (a GPU and half precision), plain
    PyTorch, or the kernels where they are installed and can run."""
    mismatch_limit: float | None = None
    """Largest accepted difference between trainer and engine log-probs; none takes the limit of the dtype."""
