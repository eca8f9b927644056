"""Which models are served by which engines, beyond one group of equal ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.settings.external import read_addresses
from slime.settings.fields import Need, is_not_zero, opt
from slime.settings.flags import require_key
from slime.settings.group import Passed, Rule
from slime.settings.ranges import COUNT
from slime.settings.topology import topology_of

if TYPE_CHECKING:
    from slime.settings.args import Args

_ENGINES = Need(lambda s: not s.debug_train_only, "engines, which --debug-train-only starts none of")


@dataclass(frozen=True, kw_only=True)
class TopologySettings:
    """Models and groups of engines (docs/topologies.md)."""

    sglang_config: str | None = opt(None, needs=_ENGINES)
    """YAML file with models (the policy, and others that stay as they are) and the groups of engines that serve each.
    Hooks ask one by its name: `current().models["judge"]`."""
    prefill_num_servers: int | None = opt(None, needs=_ENGINES, within=COUNT)
    """So many of the engines read prompts, and hand keys and values to the others, which sample."""
    rollout_external_engine_addrs: tuple[str, ...] = opt((), asks=is_not_zero, needs=_ENGINES)
    """HOST:PORT of SGLang servers that run already and serve the policy; the run starts none of its own. Or @FILE, with
    one address in each line, which is read again whenever it changes: engines join and leave. Their key is
    --sglang-api-key, or SLIME_ENGINE_API_KEY of the environment; the key to their weights, if they have one of its own,
    --sglang-admin-api-key or SLIME_ENGINE_ADMIN_API_KEY."""


def topology_adds_up(args: Args) -> str | None:
    """The engines of the file have all inference GPUs, and no more."""
    if args.sglang_config is None or args.debug_train_only:
        return None
    total = topology_of(args).num_gpus
    if total == args.rollout_num_gpus:
        return None
    return (
        f"got rollout_num_gpus {args.rollout_num_gpus}, and groups of {total} GPUs in {args.sglang_config}; leave "
        "--rollout-num-gpus out, or make them equal"
    )


def models_are_folders(args: Args) -> str | None:
    """What engines load is there before they start."""
    if args.sglang_config is None:
        return None
    others = [model for model in topology_of(args).models if model.path != args.hf_checkpoint]
    absent = [
        f"{model.path} for model {model.name}" for model in others if not (Path(model.path) / "config.json").is_file()
    ]
    if not absent:
        return None
    return f"got model_path {', '.join(absent)} in {args.sglang_config}, where no config.json is; give a folder"


def external_engines_have_addresses(args: Args) -> str | None:
    """Looked at, not asked: parsing a command line asks nobody."""
    try:
        read_addresses(args.rollout_external_engine_addrs)
    except ConfigError as error:
        return str(error)
    return None


def external_engines_are_the_fleet(args: Args) -> str | None:
    """They are where they are and what they are."""
    if not args.rollout_external_engine_addrs:
        return None
    for flag, why in _against_external_engines(args):
        return f"got --rollout-external-engine-addrs with {flag}: {why}"
    return None


def _against_external_engines(args: Args) -> Iterator[tuple[str, str]]:
    if args.colocate:
        yield "--colocate", "engines that run already lend no memory; drop one of the two"
    if args.sglang_config is not None:
        yield "--sglang-config", "the file says which engines the run starts, and it starts none; drop one of the two"
    if args.update_weight_transport == "tensor" and not args.debug_rollout_only:
        yield (
            "--update-weight-transport tensor",
            "it is shared memory of the trainer's host, which a server that somebody else started need not be able to "
            "open; use distributed, or disk with a folder that the engines see",
        )


ENGINE_KEY_ENV, ADMIN_KEY_ENV = "SLIME_ENGINE_API_KEY", "SLIME_ENGINE_ADMIN_API_KEY"
"""Hold the keys of engines: other users of the host can read a command line, not an environment."""


def _of_environment(name: str) -> Callable[[Any], str | None]:
    def key(s: Any) -> str | None:
        found = os.environ.get(name) if s.rollout_external_engine_addrs else None
        if found:
            require_key(found, name)
        return found or None

    return key


PASSED: tuple[Passed, ...] = (
    Passed("sglang", "api_key", _of_environment(ENGINE_KEY_ENV), ENGINE_KEY_ENV),
    Passed("sglang", "admin_api_key", _of_environment(ADMIN_KEY_ENV), ADMIN_KEY_ENV),
)

RULES: tuple[Rule, ...] = (
    topology_adds_up,
    models_are_folders,
    external_engines_have_addresses,
    external_engines_are_the_fleet,
)
