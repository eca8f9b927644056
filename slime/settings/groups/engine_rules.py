"""What engines cannot be: rules over every group of engines that the topology wants.

Without `--sglang-config` that is one group, whose settings are the flags; with it each group of the file, and messages
name its place. All engines need a layout, heads that it divides, and kernels; the policy's have to hold what the
trainer sends and verifies. Engines that run already say themselves what they are (`slime.fleet.fitting`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.hf_config import read_hf_config
from slime.core.topology import EngineGroup, EngineLayout, ServedModel
from slime.settings.engine_layout import layout_of_group, settings_of_group
from slime.settings.families import layout_problem_of
from slime.settings.group import Rule
from slime.settings.topology import topology_of

if TYPE_CHECKING:
    from slime.settings.args import Args

UNVERIFIED: Mapping[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "enable_eplb": (None, False),
    "init_expert_location": (None, "trivial"),
    "ep_num_redundant_experts": (None, 0),
    "elastic_ep_backend": (None, "none"),
    "moe_a2a_backend": (None, "none"),  # deepep: shared experts are whole on each rank
    "moe_dp_size": (None, 1),
    "attn_cp_size": (None, 1),
    "enable_prefill_cp": (None, False),
    "enable_dp_attention_local_control_broadcast": (None, False),
}
"""Settings of SGLang -> values under which its ranks hold what `slime.weights.holding` says, and report it."""


@dataclass(frozen=True, slots=True)
class _Engines:
    """A group of engines that run, as the rules see it."""

    model: ServedModel
    group: EngineGroup
    sglang: Mapping[str, Any]
    """ServerArgs by field name, of the run and of the group."""

    def told(self, problem: str) -> str:
        """The problem with its place."""
        return f"{self.group.place}: {problem}" if self.group.place else problem


def _engines(args: Args) -> Iterator[_Engines]:
    """All groups that run; a width below 1 is refused by its range."""
    for model in topology_of(args).models:
        for group in model.groups:
            if group.runs and group.num_gpus_per_engine > 0:
                yield _Engines(model, group, settings_of_group(args, group))


def synced_engines(args: Args) -> Iterator[_Engines]:
    """Those that the trainer sends weights to. Of their drafts `slime.settings.groups.speculation` speaks."""
    return (engines for engines in _engines(args) if engines.model.trained and not args.debug_rollout_only)


def _laid_out(args: Args, all_engines: Iterator[_Engines]) -> Iterator[tuple[_Engines, EngineLayout]]:
    """Those that have a layout; of others `engines_have_a_layout` speaks."""
    for engines in all_engines:
        try:
            layout = layout_of_group(args, engines.model, engines.group)
        except ConfigError:
            continue
        yield engines, layout


def engines_have_a_layout(args: Args) -> str | None:
    """Their GPUs divide into pipeline stages, DP groups and groups of experts."""
    for engines in _engines(args):
        try:
            layout_of_group(args, engines.model, engines.group)
        except ConfigError as error:
            return engines.told(str(error))
    return None


def engines_divide_heads(args: Args) -> str | None:
    """SGLang shards heads over the ranks that share attention; on a GPU, fewer KV heads than these are replicated."""
    for engines, layout in _laid_out(args, _engines(args)):
        ranks, (heads, kv_heads) = layout.attention_tp_size, _heads(args, engines.model)
        if heads % ranks:
            return engines.told(
                f"got engines whose attention {ranks} ranks share ({layout}), which does not divide the {heads} "
                "attention heads; choose another number of GPUs per engine"
            )
        if kv_heads and args.device == "cuda" and kv_heads % ranks and ranks % kv_heads:
            return engines.told(
                f"got engines whose attention {ranks} ranks share ({layout}) for {kv_heads} KV heads, where neither "
                "number divides the other; choose another number of GPUs per engine"
            )
    return None


def _heads(args: Args, model: ServedModel) -> tuple[int, int]:
    """Attention heads and KV heads of a model; 0 where its checkpoint says nothing of them."""
    if model.path == args.hf_checkpoint:
        return int(args.megatron["num_attention_heads"]), int(args.megatron["num_query_groups"] or 0)
    if not (Path(model.path) / "config.json").is_file():  # `models_are_folders` speaks of it
        return 0, 0
    config = read_hf_config(model.path)
    return int(config.get("num_attention_heads") or 0), int(config.get("num_key_value_heads") or 0)


def engines_divide_the_model(args: Args) -> str | None:
    """SGLang's models differ in what they can be divided by, so that each rank holds what the trainer verifies."""
    for engines, layout in _laid_out(args, synced_engines(args)):
        if problem := layout_problem_of(engines.model.path, layout):
            return engines.told(f"got engines of {layout} for this checkpoint: {problem}; choose another layout")
    return None


def engines_serve_what_tables_say(args: Args) -> str | None:
    """The trainer knows what each rank of an engine holds, unquantised, with experts in their order."""
    for engines in synced_engines(args):
        odd = [name for name, plain in UNVERIFIED.items() if engines.sglang.get(name) not in plain]
        if odd:
            return engines.told(
                f"got --sglang-{odd[0].replace('_', '-')} {engines.sglang[odd[0]]}: the engine would hold other "
                "tensors than the trainer verifies after each sync; leave it out"
            )
    return None


def engines_need_a_gpu(args: Args) -> str | None:
    """On a CPU SGLang loads experts apart and DP attention, and fails at the first request."""
    for engines, layout in _laid_out(args, _engines(args)):
        if args.device == "cpu" and max(layout.ep_size, layout.dp_size) > 1:
            name = "ep_size" if layout.ep_size > 1 else "dp_size"
            return engines.told(
                f"got sglang_{name} {getattr(layout, name)} on a CPU, where SGLang's plain kernels know neither "
                "experts of other ranks nor DP attention; leave it out there"
            )
    return None


def engines_pause(args: Args) -> str | None:
    """Where requests go on under new weights, each prompt is read at once, and every stage pauses."""
    mode = args.pause_generation_mode
    if mode == "abort":
        return None
    for engines in _engines(args):
        if not engines.model.trained:
            continue
        name = "chunked_prefill_size"
        if engines.sglang.get(name) != args.sglang.get(name):
            return engines.told(
                f"got {name} {engines.sglang.get(name)} with --pause-generation-mode {mode}, under which engines "
                f"have {args.sglang.get(name)}; leave it out"
            )
        if int(engines.sglang.get("pp_size") or 1) > 1:
            return engines.told(
                f"got --pause-generation-mode {mode} with sglang_pp_size {engines.sglang['pp_size']}: SGLang goes on "
                "serving in pipeline stages while weights change; use abort"
            )
    return None


RULES: tuple[Rule, ...] = (
    engines_have_a_layout,
    engines_divide_heads,
    engines_divide_the_model,
    engines_serve_what_tables_say,
    engines_need_a_gpu,
    engines_pause,
)
