"""Checks whether an external engine is compatible with a run: version, model, layout and settings.

All problems are reported together, with the flags that fix them, because every fix requires restarting the server. A
server reports the names of its tensors but not their shapes. Names are always compared; model dimensions only if this
host can read the server's `config.json`. Otherwise, the first weight sync rejects tensors of different shapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.engine_interface import BEFORE_SESSIONS, WINDOW, matches, parsed
from slime.core.errors import ConfigError
from slime.core.hf_config import read_hf_config, text_config
from slime.core.text import listed
from slime.core.topology import EngineLayout
from slime.models import layout_problem, table_for
from slime.models.common.table import FamilyTable
from slime.serving.watch import KEYS, ServerFacts
from slime.settings import Args
from slime.settings.conditions import requests_continue
from slime.settings.groups.engines import ALGORITHM, UNVERIFIED, kept_prefixes
from slime.settings.topology_yaml import layout_of

SAME_IN_CONFIG = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "tie_word_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
)
"""Keys of `config.json` that must match: dimensions, and settings that change log-probs without changing a tensor."""
NOT_RENEWED = ("glm4_moe", "glm4_moe_lite")
"""Models for which stock SGLang 0.5.16 keeps a second copy of a weight, which weight syncs do not update and digests do
not cover (`slime.compat.sglang_0_5_16`)."""
LAUNCHER = "python -m slime.serving.launch"
LOADER = "slime.weights.expert_runs.load"
"""Entry in `custom_weight_loader` that identifies servers started by slime's launcher."""
UNSET = (None, False)
DTYPES = {"half": "float16", "float": "float32"}
"""Dtype alias -> canonical name."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The properties that a run requires of an external engine."""

    config: Mapping[str, Any]
    """The checkpoint's config.json."""
    table: FamilyTable
    settings: Mapping[str, Any]
    """ServerArgs name -> required value, set by the user or required by other settings."""
    labels: bool
    """Whether responses must include per-token weight versions."""
    experts: bool
    """Whether responses must include routed experts."""
    trains: bool
    """Whether the run sends weights."""

    @classmethod
    def of(cls, args: Args) -> Wanted:
        config = read_hf_config(str(args.hf_checkpoint))
        given = {name: value for name, value in args.sglang.items() if value is not None and name not in KEYS}
        return cls(
            config=config,
            table=table_for(config),
            settings={"dtype": "bfloat16", **given},
            labels=requests_continue(args),
            experts=bool(args.sglang.get("enable_return_routed_experts")),
            trains=not args.debug_rollout_only,
        )


def misfits(facts: ServerFacts, wanted: Wanted) -> list[str]:
    """Returns all incompatibilities, one line each, with the reason and the fix. Empty if the engine is compatible."""
    found = list(_of_model(facts, wanted))
    if not found:
        found += _of_tensors(facts, wanted)
    return [*_of_version(facts, wanted), *found, *_of_layout(facts, wanted), *_of_settings(facts, wanted)]


def report(found: Mapping[str, Sequence[str]]) -> str:
    lines = [f"  {url}\n" + "\n".join(f"    - {problem}" for problem in problems) for url, problems in found.items()]
    return (
        f"this run cannot use {len(found)} external engine{'s' * (len(found) > 1)}:\n"
        + "\n".join(lines)
        + '\nStart them as described under "Engines that run already" in docs/serving_topology.md, '
        + "or remove their addresses"
    )


def _of_version(facts: ServerFacts, wanted: Wanted) -> Iterator[str]:
    version, (oldest, newest) = facts.info.get("version"), WINDOW["sglang"]
    if not matches(parsed(version), f">={oldest},<={newest}"):
        yield f"it runs SGLang {version}, but slime supports {oldest} to {newest}; install one of these versions"


def _of_model(facts: ServerFacts, wanted: Wanted) -> Iterator[str]:
    config = wanted.config
    served = facts.model.get("architectures") or [facts.model.get("model_type")]
    ours = config.get("architectures") or [config.get("wrapper_type", config.get("model_type"))]
    if facts.model.get("is_generation") is False or facts.info.get("is_embedding"):
        yield "it is an embedding server, which cannot sample; start it without --is-embedding"
    if bool(facts.model.get("architectures")) is not bool(config.get("architectures")):  # only one of the two has them
        served, ours = [facts.model.get("model_type")], [config.get("wrapper_type", config.get("model_type"))]
    if list(served) != list(ours):
        path = facts.model.get("model_path")
        yield f"it serves model {served[0]} ({path}), not {ours[0]}; set --model-path to the run's checkpoint"
        return
    differing = [f"{name} {theirs} instead of {mine}" for name, theirs, mine in _differences(facts, config)]
    if differing:
        yield f"its model {facts.model.get('model_path')} has {', '.join(differing)}; serve the run's checkpoint"


def _differences(facts: ServerFacts, ours: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, theirs, ours) for each config difference. Nothing if this host cannot read the server's folder."""
    try:
        theirs = text_config(json.loads((Path(str(facts.model.get("model_path"))) / "config.json").read_text()))
    except (OSError, ValueError):
        return
    for name in SAME_IN_CONFIG:
        if theirs.get(name) != ours.get(name) and None not in (theirs.get(name), ours.get(name)):
            yield name, theirs.get(name), ours.get(name)


def _of_tensors(facts: ServerFacts, wanted: Wanted) -> Iterator[str]:
    held = {name for name in facts.resident if not wanted.table.carries(name)}
    meant = set(wanted.table.resident) | {e.plus_one for e in wanted.table.entries if e.plus_one}
    missing, extra = sorted(meant - held), sorted(held - meant)
    if any("shared_expert" in name for name in missing):
        yield "it fuses shared experts with routed ones; start it with --disable-shared-experts-fusion"
    elif missing or extra:
        parts = [f"has no {listed(missing, 3)}"] * bool(missing) + [f"has {listed(extra, 3)}"] * bool(extra)
        yield f"its model {' and '.join(parts)}, unlike the run's checkpoint; serve that checkpoint"


def _of_layout(facts: ServerFacts, wanted: Wanted) -> Iterator[str]:
    worker = "encoder" if facts.info.get("encoder_only") else facts.info.get("disaggregation_mode", "null")
    if worker != "null":
        yield f"it is a {worker} worker, which cannot serve requests alone; start it without disaggregation"
    for name, plain in UNVERIFIED.items():
        if name in facts.info and facts.info[name] not in plain:
            yield (
                f"with {_flag(name)} {facts.info[name]}, its tensors differ from those that the trainer verifies after "
                "each weight sync; drop the flag"
            )
    if facts.info.get(ALGORITHM):
        yield (
            f"with {_flag(ALGORITHM)} {facts.info[ALGORITHM]}, it has a draft model, which slime cannot verify on an "
            "external engine; drop the flag"
        )
    try:
        layout = layout_of_server(facts)
    except ConfigError as error:
        yield str(error)
    else:
        yield from _of_sizes(layout, facts, wanted)
    if facts.info.get("enable_lora") or facts.info.get("lora_paths"):
        yield "it serves LoRA adapters on top of the weights that the run verifies; start it without LoRA"


def layout_of_server(facts: ServerFacts) -> EngineLayout:
    """Returns the server's engine layout. Raises `ConfigError` for unsupported sizes."""
    stages = int(facts.info.get("pp_size") or 1)
    return layout_of(int(facts.info.get("tp_size") or 1) * stages, facts.info)


def _of_sizes(layout: EngineLayout, facts: ServerFacts, wanted: Wanted) -> Iterator[str]:
    ranks, heads = layout.attention_tp_size, wanted.table.sizes.num_heads
    if heads % ranks:
        yield f"{layout}: the {heads} heads cannot be split over {ranks} attention ranks; choose a divisor"
    elif wanted.trains and (problem := layout_problem(wanted.config, layout)):
        yield f"{layout}: {problem}; choose a different layout"
    if layout.pp_size > 1 and wanted.labels:
        yield (
            f"{layout}: its pipeline stages keep serving while weights change; use a single stage, or "
            "--pause-generation-mode abort"
        )
    if max(layout.pp_size, layout.dp_size) > 1 and not _has_hooks(facts):
        yield (
            f"{layout}: stock SGLang reports only its first stage or group; start it with {LAUNCHER}, and add "
            f"--custom-weight-loader {LOADER} so that the run can detect this"
        )


def _has_hooks(facts: ServerFacts) -> bool:
    """Returns whether the server was started by slime's launcher, according to its settings."""
    return LOADER in (facts.info.get("custom_weight_loader") or ())


def _of_settings(facts: ServerFacts, wanted: Wanted) -> Iterator[str]:
    for name, value in wanted.settings.items():
        has = facts.info.get(name)
        if name in facts.info and not _same(has, value):
            yield f"it has {_flag(name)} {_shown(has)}, but the run requires {_shown(value)}; change the setting"
    if wanted.trains:
        yield from kept_prefixes(facts.info, divided=wanted.labels)
    if facts.is_open:
        if not wanted.trains:
            yield "a weight update of another run was interrupted, and this run syncs no weights; restart it"
        return
    if facts.probe is None:
        yield f"it failed to generate a few test tokens: {facts.problem}"
        return
    if facts.probe.repeats:
        yield "each streaming event repeats the previous ones; start it with --incremental-streaming-output"
    if wanted.labels and not facts.probe.labels:
        yield (
            "its responses do not include per-token weight versions, which --pause-generation-mode retract and "
            f"in_place require; start it with {LAUNCHER} --token-versions"
        )
    if wanted.experts and not facts.probe.experts:
        yield (
            "it ignores the mark in a request's id that asks for routed experts; start it with "
            f"{LAUNCHER} ... --enable-return-routed-experts"
        )
    renews = not matches(parsed(facts.info.get("version")), BEFORE_SESSIONS)
    if str(facts.model.get("model_type")) in NOT_RENEWED and not renews and not _has_hooks(facts):
        yield (
            "stock SGLang keeps a copy of this model's expert routers, which weight syncs do not update and digests "
            f"do not cover; start it with {LAUNCHER}, and add --custom-weight-loader {LOADER} so that the run can "
            "detect this"
        )
    if not wanted.trains and not str(facts.model.get("weight_version")).isdecimal():
        yield (
            f"--weight-version {facts.model.get('weight_version')} is not a number, and there is no weight sync that "
            "would set it in this run; start it with --weight-version 0"
        )


def _same(has: Any, value: Any) -> bool:
    has, value = (DTYPES.get(v, v) if isinstance(v, str) else v for v in (has, value))
    if isinstance(value, list | tuple) or isinstance(has, list | tuple):
        return list(has or ()) == list(value or ())
    return bool(has == value or (has in UNSET and value in UNSET))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(value: Any) -> str:
    return "off" if value in UNSET else "on" if value is True else str(value)


def refuse(found: Mapping[str, Sequence[str]]) -> None:
    """Raises one `ConfigError` that lists all incompatibilities, if any. `found`: address -> incompatibilities."""
    wrong = {url: problems for url, problems in found.items() if problems}
    if wrong:
        raise ConfigError(report(wrong))
