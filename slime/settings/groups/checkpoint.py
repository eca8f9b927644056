"""What is loaded and saved, and when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.settings.fields import Adjusted, Need, internal, opt
from slime.settings.group import Rule
from slime.settings.model_folders import has_hf_model, has_megatron_checkpoint, what_to_give
from slime.settings.ranges import COUNT, SECONDS, STEPS, STEPS_OR_NONE

if TYPE_CHECKING:
    from slime.settings.args import Args


def has_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint or holds one, by the names that the trainer gives them."""
    root = Path(folder)
    return any((root / name).is_file() for name in ("manifest.json", "latest.json")) or any(
        root.glob("step_*/manifest.json")
    )


def _fresh_start(load: Any, s: Any) -> Adjusted | None:
    if load and has_hf_model(load) and not has_checkpoint(load):
        return Adjusted(None, "--load is a folder in Hugging Face format: the run starts from its weights")
    same = load and s.save and Path(load).resolve() == Path(s.save).resolve()
    if not same or has_checkpoint(load):
        return None
    return Adjusted(None, "--load is --save and holds no checkpoint yet; the run starts without it")


def _start(s: Any) -> str:
    """Folder of the weights that a run without a checkpoint starts from."""
    load = s.given("load")
    if load and has_hf_model(load) and not has_checkpoint(load):
        return str(load)
    return str(s.given("ref_load") or s.hf_checkpoint)


_SAVES = Need(lambda s: s.save is not None, "--save")
_REMOVES = Need(lambda s: s.save_keep_last is not None, "--save-keep-last: all are kept anyway")
_LOADS = Need(lambda s: not s.origins.get("load", "default").startswith("default"), "--load")  # given, if dropped
_RESUMES = Need(lambda s: s.load is not None, "--load of a folder with checkpoints")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints hold everything needed to resume: weights, optimizer, RNG, data cursor, buffer, version."""

    load: str | None = opt(None, adjust=_fresh_start)
    """Checkpoint folder to resume from; if it is also --save and still empty, the run starts as without it. Or a folder
    in Hugging Face format, from whose weights the trainer starts in place of those of --ref-load or --hf-checkpoint."""
    initial_weights: str = internal(_start, "--load in Hugging Face format, else --ref-load, else --hf-checkpoint")
    """Where the policy's weights come from, unless a checkpoint is resumed."""
    ckpt_step: int | None = opt(None, needs=_RESUMES, within=STEPS_OR_NONE)
    """The step to load of --load. Default: the latest."""
    save: str | None = None
    """Checkpoint folder."""
    save_interval: int | None = opt(None, within=STEPS)
    """Steps between checkpoints; the last step is always saved when --save is given."""
    save_timeout_s: float = opt(3600.0, within=SECONDS)
    """Limit of writing one checkpoint, and of reading one, in seconds: raise it for terabytes on a slow disk."""
    async_save: bool = opt(False, needs=_SAVES)
    """Copy the state to host memory and write it while training goes on; the next save waits for the one before."""
    save_keep_last: int | None = opt(None, needs=_SAVES, within=COUNT)
    """Checkpoints to keep below --save; older ones are removed after a new one is complete. Default: all."""
    save_retain_interval: int | None = opt(None, needs=(_SAVES, _REMOVES), within=STEPS)
    """Of those that --save-keep-last would remove, keep each that ends a multiple of this many steps."""
    save_hf: str | None = None
    """Also save in HF format here; {rollout_id} in the path is replaced."""
    no_save_optim: bool = opt(False, needs=_SAVES)
    """Leave optimizer, scheduler and RNG out of checkpoints (resuming then needs --no-load-optim or --finetune)."""
    no_load_optim: bool = opt(False, needs=_LOADS)
    """Start with a fresh optimizer."""
    no_load_rng: bool = opt(False, needs=_LOADS)
    """Start with a fresh RNG."""
    finetune: bool = opt(False, needs=_LOADS)
    """Take only the weights of --load and start at step 0."""


def saving_has_a_place(args: Args) -> str | None:
    """Checkpoints go somewhere."""
    if args.save_interval is None or args.save is not None or args.save_hf is not None:
        return None
    return f"got save_interval {args.save_interval} without --save or --save-hf; say where to"


def load_holds_a_checkpoint(args: Args) -> str | None:
    """A run that is meant to continue does not start over. (An empty --load that is --save was dropped before.)"""
    if args.load is None or not Path(args.load).is_dir():
        return None
    if has_checkpoint(args.load):
        places = (Path(args.load), Path(args.load) / f"step_{args.ckpt_step or 0:06d}")
        if args.ckpt_step is None or any((place / "manifest.json").is_file() for place in places):
            return None
        there = sorted(path.parent.name for path in Path(args.load).glob("step_*/manifest.json"))
        return f"got ckpt_step {args.ckpt_step}, which {args.load} does not hold; it has {', '.join(there)}"
    if has_megatron_checkpoint(args.load):
        return f"got load {args.load}, a checkpoint of Megatron, made of pickles; {what_to_give(args.load)}"
    return (
        f"got load {args.load}, which holds no checkpoint (no manifest.json, no step_*) and no model in Hugging Face "
        "format (no config.json); give the --save folder of the run to continue"
    )


RULES: tuple[Rule, ...] = (saving_has_a_place, load_holds_a_checkpoint)
