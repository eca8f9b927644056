"""Images in prompts: which column holds them, and what they do not go together with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.core.hf_config import quantisation_of, read_hf_config
from slime.settings.conditions import estimator_of, fine_tunes
from slime.settings.families import images_problem_of
from slime.settings.fields import opt
from slime.settings.group import Passed, Rule
from slime.settings.topology import topology_of

if TYPE_CHECKING:
    from slime.settings.args import Args

KIND = "image"
"""The kind of media that is trained on."""
SLOW = "disable_fast_image_processor"
"""SGLang's switch for the processor that the trainer uses."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Images in prompts (docs/vision.md)."""

    multimodal_keys: dict[str, str] | None = opt(None)
    """Column of the data with the images of a prompt, a JSON object: {"image": "images"}. In the prompt <image> stands
    for each. The vision tower is frozen; Qwen3-VL alone reads images (docs/vision.md)."""


def images_are_read(args: Args) -> str | None:
    """Of what a public script may ask for, images of a dense Qwen3-VL are trained on."""
    keys = args.multimodal_keys
    if keys is None:
        return None
    if set(keys) != {KIND} or not all(isinstance(column, str) and column for column in keys.values()):
        return f'got multimodal_keys {keys}; images alone are read: give \'{{"image": "COLUMN"}}\''
    if problem := images_problem_of(args.hf_checkpoint):
        return f"got multimodal_keys with hf_checkpoint {args.hf_checkpoint}, but {problem}"
    if not args.apply_chat_template and not fine_tunes(args):
        return "got multimodal_keys without --apply-chat-template, which puts images into prompts; add it"
    return None


def images_go_with_the_rest(args: Args) -> str | None:
    """What was not built, or not shown to be right, with images."""
    if args.multimodal_keys is None:
        return None
    wrong = list(_apart(args))
    return None if not wrong else f"got multimodal_keys with {', '.join(wrong)}; drop one of the two"


def _apart(args: Args) -> Iterator[str]:
    if fine_tunes(args):
        yield "--loss-type sft_loss, which renders conversations without images"
    if args.lora_rank is not None:
        yield "--lora-rank, which was not tried with images"
    if estimator_of(args).needs_critic:
        yield f"--advantage-estimator {args.advantage_estimator}, whose critic sees none"
    if args.use_opd:
        yield "--use-opd, whose teacher sees none"
    if quantisation_of(read_hf_config(args.hf_checkpoint)) is not None:
        yield "a quantised hf_checkpoint, whose engines were not compared with images"
    if any(model.in_pairs for model in topology_of(args).models):
        yield "engines in pairs, which do not hand images on"


def _slow(s: Any) -> bool | None:
    return None if s.multimodal_keys is None else True


PASSED: tuple[Passed, ...] = (Passed("sglang", SLOW, _slow, "--multimodal-keys: the trainer's own processor"),)
RULES: tuple[Rule, ...] = (images_are_read, images_go_with_the_rest)
