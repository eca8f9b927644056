"""Folders that hold a model: what a name on the command line means, and what is refused, before anything starts.

A checkpoint of Megatron is a folder of pickles, which no run reads (law 10): `slime convert` makes a Hugging Face
folder of it. Hugging Face folders are read directly.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slime.core.files import download_hint
from slime.settings.families import architecture_of
from slime.settings.group import Rule

if TYPE_CHECKING:
    from slime.settings.args import Args

_MEGATRON_FILES = ("latest_checkpointed_iteration.txt", ".metadata", "common.pt")
_MEGATRON_SUFFIX = "_torch_dist"
"""How public scripts call the folder that was made of a Hugging Face one."""
_LENGTHS = ("max_position_embeddings",)
"""Of the architecture, what may differ between the weights that a run starts from and the engines' model."""


def has_hf_model(folder: str) -> bool:
    """Whether a folder is one in Hugging Face format."""
    return (Path(folder) / "config.json").is_file()


def has_megatron_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint that Megatron wrote, or holds one."""
    root = Path(folder)
    places = (root, *root.glob("iter_*"), root / "release")
    return any((place / name).is_file() for place in places for name in _MEGATRON_FILES)


def what_to_give(folder: str) -> str:
    """What to do about a folder that is not in Hugging Face format, or not there."""
    path = Path(folder)
    convert = (
        f"slime convert {folder} OUT --hf-checkpoint MODEL --trust-pickle" if has_megatron_checkpoint(folder) else ""
    )
    if path.name.endswith(_MEGATRON_SUFFIX):
        origin = path.with_name(path.name.removesuffix(_MEGATRON_SUFFIX))
        made_of = f"nothing has to be converted: give the Hugging Face folder that it was made of, {origin}"
        return f"{made_of}, or what this writes: {convert}" if convert else made_of
    if convert:
        return f"give the Hugging Face folder that this writes: {convert}"
    return download_hint(folder) or "give a folder in Hugging Face format"


def folders_exist(args: Args) -> str | None:
    """Each folder that a run reads is there."""
    names = ("load", "ref_load", "critic_load", "opd_teacher_load")
    for name in names:
        folder = getattr(args, name)
        if folder is not None and not Path(folder).is_dir():
            do = "give an existing one, or leave it out" if name == "load" else what_to_give(folder)
            return f"got {name} {folder}, which is not a folder; {do}"
    return None


def folders_are_models(args: Args) -> str | None:
    """Models are in Hugging Face format."""
    for name in ("ref_load", "critic_load", "opd_teacher_load"):
        folder = getattr(args, name)
        if folder is None or not Path(folder).is_dir() or has_hf_model(folder):
            continue
        kind = "a checkpoint of Megatron, made of pickles" if has_megatron_checkpoint(folder) else "without config.json"
        return f"got {name} {folder}, {kind}; {what_to_give(folder)}"
    return None


def initial_weights_fit(args: Args) -> str | None:
    """The trainer starts from a model of the architecture that engines serve."""
    folder = args.initial_weights
    if folder == args.hf_checkpoint or not has_hf_model(folder):
        return None
    ours, theirs = architecture_of(args.hf_checkpoint), architecture_of(folder)
    differing = [n for n in ours if n not in _LENGTHS and ours[n] != theirs.get(n)]
    if not differing:
        return None
    one = differing[0]
    return (
        f"got initial weights {folder} (--load or --ref-load) with {one} {theirs.get(one)}, and hf_checkpoint "
        f"{args.hf_checkpoint} with {ours[one]}; give models of one architecture"
    )


RULES: tuple[Rule, ...] = (folders_exist, folders_are_models, initial_weights_fit)
