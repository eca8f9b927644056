"""The rules of files and folders: what a run reads is there, and nothing that it needs is overwritten.

Files are looked at, none but config.json is opened: these checks cost microseconds.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from slime.core.hf_config import read_hf_config
from slime.settings.args import Args
from slime.settings.data_files import split_slice
from slime.settings.derive import SFT_ROLLOUT, has_checkpoint
from slime.settings.eval_config import eval_datasets
from slime.settings.rules import RULE_DEFAULT_ROLLOUT, Rule


def saving_has_a_place(args: Args) -> str | None:
    """Checkpoints go somewhere."""
    if args.save_interval is None or args.save is not None or args.save_hf is not None:
        return None
    return f"got save_interval {args.save_interval} without --save or --save-hf; say where to"


def prompts_exist(args: Args) -> str | None:
    """Something to generate from."""
    if args.prompt_data is not None or args.num_rollout == 0 or args.data_source_path or args.load_debug_rollout_data:
        return None
    if args.rollout_function_path not in (RULE_DEFAULT_ROLLOUT, SFT_ROLLOUT):
        return None
    return "got no --prompt-data; give a .jsonl or .parquet file, or --data-source-path"


def files_exist(args: Args) -> str | None:
    """Files are there, and readable formats."""
    files = [] if args.prompt_data is None else [("prompt_data", args.prompt_data)]
    files += [(f"evaluation data {d.name}", d.path) for d in eval_datasets(args)]
    for name, spec in files:
        path, _ = split_slice(spec)
        if not path.is_file():
            return f"got {name} {path}, which does not exist; give a .jsonl or .parquet file"
    for name, folder in (
        ("load", args.load),
        ("ref_load", args.ref_load),
        ("critic_load", args.critic_load),
        ("opd_teacher_load", args.opd_teacher_load),
    ):
        if folder is not None and not Path(folder).is_dir():
            return f"got {name} {folder}, which is no folder; give an existing one"
    return None


def engines_serve_plain_weights(args: Args) -> str | None:
    """Engines load --hf-checkpoint as it is, and the trainer sends them weights without block scales."""
    if args.debug_train_only or not read_hf_config(args.hf_checkpoint).get("quantization_config"):
        return None
    return (
        f"got hf_checkpoint {args.hf_checkpoint}, which is quantised: engines would serve it so, and cannot take "
        "the trainer's weights; do: slime convert IN OUT --to bf16, and give OUT"
    )


def load_holds_a_checkpoint(args: Args) -> str | None:
    """A run that is meant to continue does not start anew. (--load that is --save and empty was dropped before.)"""
    if args.load is None or not Path(args.load).is_dir():
        return None
    if has_checkpoint(args.load):
        places = (Path(args.load), Path(args.load) / f"step_{args.ckpt_step or 0:06d}")
        if args.ckpt_step is None or any((place / "manifest.json").is_file() for place in places):
            return None
        there = sorted(path.parent.name for path in Path(args.load).glob("step_*/manifest.json"))
        return f"got ckpt_step {args.ckpt_step}, which {args.load} does not hold; it has {', '.join(there)}"
    return (
        f"got load {args.load}, which holds no checkpoint (no manifest.json, no step_*); give the --save folder of "
        "the run to continue; Hugging Face weights go into --hf-checkpoint"
    )


def one_first_step(args: Args) -> str | None:
    """A checkpoint says which step follows it."""
    if args.start_rollout_id is None:
        return None
    if args.start_rollout_id < 0:
        return f"got start_rollout_id {args.start_rollout_id}; steps count from 0"
    if args.load is None or args.finetune:
        return None
    return (
        f"got start_rollout_id {args.start_rollout_id} with load {args.load}, whose checkpoint says which step is "
        "next; drop it, or add --finetune to take only the weights"
    )


def export_replaces_nothing_else(args: Args) -> str | None:
    """An export replaces the whole folder of its name, so nothing else may live there."""
    if args.save_hf is None:
        return None
    try:
        exports = _export_folders(args.save_hf)
    except (KeyError, IndexError, ValueError) as error:
        return f"got save_hf {args.save_hf}, whose braces name something else ({error!r}); only {{rollout_id}} is known"
    for name, path in _in_use(args):
        if exports.fullmatch(os.path.realpath(path)):
            return (
                f"got save_hf {args.save_hf}, which is or holds {name} {path}: an export replaces its whole "
                "folder, and that would be deleted; give a folder of its own"
            )
    return None


_ANY = "\ue000"
"""Stands for the number of the step while a path is resolved; no folder is called so."""


def _export_folders(template: str) -> re.Pattern[str]:
    """Matches the folders that exports may replace, and everything below them."""
    template.format(rollout_id=0)
    absolute = os.path.realpath(re.sub(r"\{rollout_id[^{}]*\}", _ANY, template).replace("{{", "{").replace("}}", "}"))
    return re.compile(re.escape(absolute.rstrip("/")).replace(re.escape(_ANY), r"\d+") + r"(/.*)?", re.DOTALL)


def _in_use(args: Args) -> list[tuple[str, str]]:
    """(what it is, path) of what a run reads or writes."""
    names = (
        "hf_checkpoint",
        "ref_load",
        "critic_load",
        "opd_teacher_load",
        "load",
        "save",
        "run_dir",
        "update_weight_disk_dir",
    )
    found = [(name, getattr(args, name)) for name in names if getattr(args, name)]
    found += [(name, os.path.join(path, "step_000000")) for name, path in found if name in ("load", "save")]
    data = [*([args.prompt_data] if args.prompt_data else []), *(d.path for d in eval_datasets(args))]
    found += [("the data", str(split_slice(spec)[0])) for spec in data]
    return [*found, ("the working folder", os.getcwd())]


FILE_RULES: tuple[Rule, ...] = (
    saving_has_a_place,
    prompts_exist,
    files_exist,
    engines_serve_plain_weights,
    load_holds_a_checkpoint,
    one_first_step,
    export_replaces_nothing_else,
)
