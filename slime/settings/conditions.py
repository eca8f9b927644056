"""Conditions shared by the settings of several groups, and rules about model folders.

Runs read Hugging Face folders. They never read Megatron checkpoints, which contain pickles (law 10); `slime convert`
converts those to Hugging Face folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.files import download_hint
from slime.core.registry import load_object
from slime.core.text import slime_command
from slime.core.topology import ServedModel
from slime.settings.fields import Adjusted, Need, Rule
from slime.settings.schema import architecture_of
from slime.settings.topology_yaml import topology_of

if TYPE_CHECKING:
    from slime.settings.args import Args

ESTIMATORS = "slime.algorithms.advantages:ESTIMATORS"
"""Import path of the estimator registry, because the import contract forbids importing it directly."""


def estimator_of(s: Any) -> Any:
    """Returns the class of the advantage estimator. Raises `ConfigError` for an unknown name."""
    return load_object(ESTIMATORS).get(s.advantage_estimator)


def fine_tunes(s: Any) -> bool:
    """Returns whether the run is supervised fine-tuning, which trains on given texts without sampling or rewards."""
    return bool(s.loss_type == "sft_loss")


def trains_given_tokens(s: Any) -> bool:
    """Returns whether the run may train tokens that no engine sampled."""
    return fine_tunes(s) or bool(s.train_unsampled_tokens)


def minimises_policy_loss(s: Any) -> bool:
    """Returns whether the run uses slime's own loss: policy loss, KL to the reference, entropy bonus."""
    return bool(s.loss_type == "policy_loss")


def minimises_custom_loss(s: Any) -> bool:
    """Returns whether a user function computes the loss of sampled tokens."""
    return bool(s.loss_type == "custom_loss")


def pause_modes(s: Any) -> tuple[str, ...]:
    """Returns the modes in which weight syncs may pause engines: several if the run chooses among them (auto)."""
    if s.pause_generation_mode != "auto":
        return (s.pause_generation_mode,)
    return ("abort", "retract") if s.fully_async else ("abort",)


def requests_continue(s: Any) -> bool:
    """Returns whether requests may continue through weight syncs, so that engines must label each token's version and
    separate prefixes by weights."""
    return pause_modes(s) != ("abort",)


def computes_advantages(s: Any) -> bool:
    """Returns whether the run turns rewards into advantages."""
    return not fine_tunes(s) and bool(s.compute_advantages_and_returns)


def has_policy_term(s: Any) -> bool:
    """Returns whether slime's own policy loss is computed from advantages."""
    return minimises_policy_loss(s) and bool(s.compute_advantages_and_returns)


def samples_all_tokens(s: Any) -> bool:
    """Returns whether every token can be sampled, so that log-probs are those of the full distribution."""
    return bool(s.rollout_top_p == 1.0 and s.rollout_top_k == -1)


def has_kl(s: Any) -> bool:
    """Returns whether a KL term against the reference is computed."""
    return bool(s.kl_coef) or (s.use_kl_loss and minimises_policy_loss(s))


def has_reference(s: Any) -> bool:
    """Returns whether reference log-probs are computed: for a KL, or for a custom loss that reads them."""
    return bool(s.kl_coef) or (s.use_kl_loss and not fine_tunes(s))


def lends_at_start(s: Any) -> bool:
    """Returns whether training ranks release their GPUs before engines first allocate memory. False on a CPU."""
    return bool(s.device == "cuda" and s.offload_train and not s.debug_train_only)


def shares_gpus(s: Any, model: ServedModel) -> bool:
    """Returns whether some engines of `model` share GPUs (on a CPU: slots) with the trainer.

    With `--colocate`, engines of all models are placed on the training GPUs in topology order, until those are used up.
    """
    return any(begin < _num_shared(s) for begin, _ in _gpus_of(s, model))


def policy_shares_gpus(s: Any) -> bool:
    policy = topology_of(s).policy
    return policy is not None and shares_gpus(s, policy)


def policy_has_own_gpus(s: Any) -> bool:
    """Returns whether some engines of the policy have GPUs (on a CPU: slots) that no training rank uses."""
    policy = topology_of(s).policy
    return policy is not None and any(end > _num_shared(s) for _, end in _gpus_of(s, policy))


def _num_shared(s: Any) -> int:
    return int(s.actor_num_nodes * s.actor_num_gpus_per_node) if s.colocate else 0


def _gpus_of(s: Any, wanted: ServedModel) -> Iterator[tuple[int, int]]:
    """Yields the GPU range (begin, end) of each running group of `wanted`, in placement order."""
    end = 0
    for model in topology_of(s).models:
        for group in model.groups:
            begin, end = end, end + group.num_gpus
            if model.name == wanted.name and group.runs:
                yield begin, end


_POLICY_TERM_TEXT = "the policy loss: loss_type policy_loss, without --disable-compute-advantages-and-returns"

ADVANTAGES = Need(
    computes_advantages,
    "advantages: loss_type policy_loss or custom_loss, without --disable-compute-advantages-and-returns",
)
OWN_ADVANTAGES = Need(
    lambda s: not s.custom_advantage_function_path, "an estimator; --custom-advantage-function-path replaces it"
)
POLICY_TERM = Need(has_policy_term, _POLICY_TERM_TEXT)
POLICY_LOSS = Need(minimises_policy_loss, "loss_type policy_loss")
SAMPLED_LOSS = Need(lambda s: not fine_tunes(s), "loss_type policy_loss or custom_loss")
CRITIC = Need(lambda s: estimator_of(s).needs_critic, "an advantage_estimator with a critic, such as ppo")
KL = Need(has_kl, "--kl-coef, or --use-kl-loss with loss_type policy_loss")
KL_LOSS = Need(lambda s: s.use_kl_loss, "--use-kl-loss")
REFERENCE = Need(has_reference, "--use-kl-loss or --kl-coef")
ENGINE_LOG_PROBS = Need(
    lambda s: has_policy_term(s) or (minimises_policy_loss(s) and s.use_kl_loss and s.use_unbiased_kl),
    f"{_POLICY_TERM_TEXT}; or --use-unbiased-kl",
)

# --- Folders that hold a model

_MEGATRON_FILES = ("latest_checkpointed_iteration.txt", ".metadata", "common.pt")
_CONVERTED = re.compile(r"[-_.]torch[-_]dist.*")
"""Suffix of a converted folder's name in public scripts: `X_torch_dist` was converted from `X`."""
_READ_INSTEAD = "a folder in Megatron's format, so the run reads "
_LENGTHS = ("max_position_embeddings",)
"""Settings that may differ between the initial weights and the engines' model."""


def has_hf_model(folder: str) -> bool:
    return (Path(folder) / "config.json").is_file()


def has_megatron_checkpoint(folder: str) -> bool:
    """Returns whether the folder is a Megatron checkpoint or contains one."""
    root = Path(folder)
    places = (root, *root.glob("iter_*"), root / "release")
    return any((place / name).is_file() for place in places for name in _MEGATRON_FILES)


def is_trained_by_megatron(folder: str) -> bool:
    """Returns whether the folder has a Megatron checkpoint from training, not just a conversion."""
    if not has_megatron_checkpoint(folder):
        return False
    try:
        return (Path(folder) / _MEGATRON_FILES[0]).read_text().strip() != "release"
    except (OSError, UnicodeDecodeError):
        return True


def _origin(folder: str) -> str | None:
    """Infers from the name of `folder` which folder it was converted from; None if the name does not show it."""
    path = Path(folder)
    name = _CONVERTED.sub("", path.name)
    return str(path.with_name(name)) if name != path.name and name else None


def is_only_converted(folder: str) -> bool:
    """Returns whether the folder is (or, by its name, would be) a Megatron checkpoint that is only a conversion."""
    converted = has_megatron_checkpoint(folder) or (_origin(folder) is not None and not Path(folder).exists())
    return converted and not has_hf_model(folder) and not is_trained_by_megatron(folder)


def hf_origin(folder: str) -> str | None:
    """Returns the Hugging Face folder that `folder` is merely a conversion of; None if there is none."""
    origin = _origin(folder) if is_only_converted(folder) else None
    return origin if origin is not None and has_hf_model(origin) else None


def instead_of_converted(folder: Any, s: Any) -> Adjusted | None:
    """Replaces a folder that was only converted to Megatron's format with the original folder (`adjust`)."""
    return _instead(folder, hf_origin(str(folder))) if folder else None


def instead_of_start(folder: Any, s: Any) -> Adjusted | None:
    """Like `instead_of_converted`, but uses --hf-checkpoint if the original folder does not exist."""
    if not folder or not is_only_converted(str(folder)):
        return None
    return _instead(folder, hf_origin(str(folder)) or s.hf_checkpoint)


def _instead(folder: Any, found: str | None) -> Adjusted | None:
    return None if found is None else Adjusted(found, why_instead(folder, found))


def why_instead(folder: Any, found: str) -> str:
    """Returns the text that --explain and the run's startup output show for a folder that the run does not read."""
    return f"{folder} {'is' if Path(folder).exists() else 'would be'} {_READ_INSTEAD}{found}"


NO_CHECKPOINT = "does not exist or is empty, so the run starts at step 0"


def replaced_folders(args: Args) -> list[str]:
    """Returns a line for each folder that the user gave and that the run does not read."""
    names = ("load", "ref_load", "critic_load", "opd_teacher_load")
    found = {f"--{name.replace('_', '-')}": args.origins.get(name, "").removeprefix("derived: ") for name in names}
    return [f"{flag} {why}" for flag, why in found.items() if _READ_INSTEAD in why or NO_CHECKPOINT in why]


def what_to_give(folder: str) -> str:
    """Returns advice about a folder that is missing or not in Hugging Face format."""
    convert = (
        slime_command(f"convert {folder} OUT --hf-checkpoint MODEL --trust-pickle")
        if has_megatron_checkpoint(folder)
        else ""
    )
    if (origin := _origin(folder)) is not None and not is_trained_by_megatron(folder):
        made_of = f"no conversion is needed: pass the Hugging Face folder that it was converted from, {origin}"
        return f"{made_of}, or the output folder of this command: {convert}" if convert else made_of
    if convert:
        return f"pass the Hugging Face folder that this command writes: {convert}"
    return download_hint(folder) or "pass a folder in Hugging Face format"


def folders_exist(args: Args) -> str | None:
    names = ("load", "ref_load", "critic_load", "opd_teacher_load")
    for name in names:
        folder = getattr(args, name)
        if folder is not None and not Path(folder).is_dir():
            do = "pass an existing folder, or omit the flag" if name == "load" else what_to_give(folder)
            return f"{name} {folder} is not a folder; {do}"
    return None


def folders_are_models(args: Args) -> str | None:
    for name in ("ref_load", "critic_load", "opd_teacher_load"):
        folder = getattr(args, name)
        if folder is None or not Path(folder).is_dir() or has_hf_model(folder):
            continue
        kind = "is a pickled Megatron checkpoint" if has_megatron_checkpoint(folder) else "has no config.json"
        return f"{name} {folder} {kind}; {what_to_give(folder)}"
    return None


def initial_weights_fit(args: Args) -> str | None:
    folder = args.initial_weights
    if folder == args.hf_checkpoint or not has_hf_model(folder):
        return None
    ours, theirs = architecture_of(args.hf_checkpoint), architecture_of(folder)
    differing = [n for n in ours if n not in _LENGTHS and ours[n] != theirs.get(n)]
    if not differing:
        return None
    one = differing[0]
    return (
        f"the initial weights {folder} (--load or --ref-load) have {one} {theirs.get(one)}, but hf_checkpoint "
        f"{args.hf_checkpoint} has {ours[one]}; use models with the same architecture"
    )


RULES: tuple[Rule, ...] = (folders_exist, folders_are_models, initial_weights_fit)
