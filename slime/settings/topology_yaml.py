"""Reads the topology of engines from `--sglang-config` or flags, and computes the layout of one engine.

    sglang:
      - name: policy                      # the trained model: its path is --hf-checkpoint
        server_groups:
          - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2, overrides: {mem_fraction_static: 0.8}}
      - name: judge                       # frozen: its path differs
        model_path: /models/judge
        server_groups: [{worker_type: prefill, num_gpus: 2}, {worker_type: decode, num_gpus: 6}]

Names and types are checked as strictly as flags.

`--rollout-num-gpus-per-engine` counts all GPUs of an engine. `--sglang-pp-size` divides them into pipeline stages with
equal numbers of tensor-parallel ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.engine_interface import BEFORE_SESSIONS, is_installed
from slime.core.errors import ConfigError
from slime.core.processes import server_url
from slime.core.topology import (
    DEFAULT_NAME,
    EVAL_FLEET,
    PAIRED,
    EngineGroup,
    EngineLayout,
    ServedModel,
    Topology,
    Worker,
)
from slime.core.user_files import parse_yaml, read_text
from slime.settings.flags import Flag, coerce

if TYPE_CHECKING:
    from slime.settings.args import Args

_FLAG = "--sglang-config"
_MODEL_KEYS = {"name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups"}
_GROUP_KEYS = {"worker_type", "num_gpus", "num_gpus_per_engine", "overrides"}
_OF_ALL = {
    "api_key": "requests use one key for all engines; use --sglang-api-key",
    "admin_api_key": "weight syncs use one key for all engines; use --sglang-admin-api-key",
    "dtype": "weights are sent in the dtype of the run; use --sglang-dtype",
}
"""ServerArgs that a group cannot override -> why, and what to use instead."""


def topology_of(args: Args) -> Topology:
    """Returns the topology described by the settings. Raises `ConfigError` for an invalid file."""
    if args.debug_train_only:
        return Topology(())
    path = str(args.hf_checkpoint)
    if args.rollout_external_engine_addrs:  # their sizes are unknown until they respond
        return Topology((ServedModel(DEFAULT_NAME, path, ()),))
    if args.sglang_config is not None:
        found = read_topology(
            args.sglang_config,
            hf_checkpoint=path,
            num_gpus_per_engine=args.rollout_num_gpus_per_engine,
            trains=not args.debug_rollout_only,
        )
    else:
        found = Topology((ServedModel(DEFAULT_NAME, path, _groups_of_flags(args)),))
    return found if args.eval_fleet is None else _with_eval_fleet(found, args.eval_fleet)


def _with_eval_fleet(topology: Topology, num_engines: int) -> Topology:
    """Adds the engines of `--eval-fleet`: as the policy's first group of regular engines, placed after all others."""
    policy = topology.policy
    if policy is None:  # a rule refuses the flag
        return topology
    if any(model.name == EVAL_FLEET for model in topology.models):
        raise ConfigError(f"{_FLAG} has a model named {EVAL_FLEET}, as --eval-fleet calls its engines; rename it")
    running = [group for group in policy.groups if group.runs]
    like = next((group for group in running if group.worker is Worker.REGULAR), None)
    width = (like or running[0]).num_gpus_per_engine
    group = EngineGroup(num_engines * width, width, overrides=like.overrides if like is not None else {})
    return Topology((*topology.models, ServedModel(EVAL_FLEET, policy.path, (group,), only_evaluates=True)))


def _groups_of_flags(args: Args) -> tuple[EngineGroup, ...]:
    """Returns the groups of a run without `--sglang-config`."""
    width, num_prefill = args.rollout_num_gpus_per_engine, args.prefill_num_servers
    if num_prefill is None:
        return (EngineGroup(args.rollout_num_gpus, width),)
    num_gpus = num_prefill * width
    return (
        EngineGroup(num_gpus, width, Worker.PREFILL),
        EngineGroup(args.rollout_num_gpus - num_gpus, width, Worker.DECODE),
    )


def read_topology(file: str, *, hf_checkpoint: str, num_gpus_per_engine: int, trains: bool) -> Topology:
    """Reads the models of a file.

    `num_gpus_per_engine` is the default of groups; `trains` is whether the run has a trainer. Raises `ConfigError` with
    the location in the file.
    """
    return _meant(read_text(file, _FLAG, "YAML file"), file, hf_checkpoint, num_gpus_per_engine, trains)


@lru_cache(maxsize=16)
def _meant(text: str, file: str, hf_checkpoint: str, num_gpus_per_engine: int, trains: bool) -> Topology:
    """Parses the file's content for `read_topology`. Cached."""
    entries = _entries(text, file)
    models = tuple(
        _model(entry, f"{file}: sglang[{i}]", hf_checkpoint, num_gpus_per_engine) for i, entry in enumerate(entries)
    )
    names = [model.name for model in models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{file}: two models are named {twice[0]!r}, but requests select a model by name; rename one")
    policies = [model.name for model in models if model.trained]
    if trains and len(policies) != 1:
        raise ConfigError(
            f"{file}: update_weights is true for {', '.join(policies) or 'no model'}, but the trainer sends weights "
            "to exactly one model; "
            + (
                "models with the path of --hf-checkpoint get them by default, so set `update_weights: false` for the "
                "frozen one"
                if policies
                else "set it to true for the model whose path is --hf-checkpoint, and to false for others"
            )
        )
    return Topology(models)


def first_path(file: str) -> str:
    """Returns the first `model_path` in a file. Raises `ConfigError` if there is no such key."""
    entries = _entries(read_text(file, _FLAG, "YAML file"), file)
    paths = [entry["model_path"] for entry in entries if isinstance(entry, Mapping) and entry.get("model_path")]
    if not paths:
        raise ConfigError(
            f"{file} has no model_path, so the served model is unknown; add one, or set --hf-checkpoint DIR"
        )
    return str(paths[0])


def _entries(text: str, file: str) -> list[Any]:
    """Returns the list of models in a file, as parsed YAML."""
    top = _known(parse_yaml(text, f"{_FLAG} {file}"), {"sglang"}, f"{file}").get("sglang")
    if not isinstance(top, list) or not top:
        raise ConfigError(f"{file} has no list of models under `sglang`; add entries with name and server_groups")
    return top


def _model(entry: Any, where: str, hf_checkpoint: str, width: int) -> ServedModel:
    fields = _known(entry, _MODEL_KEYS, where)
    name = _typed(fields, "name", str, where)
    if not name:
        raise ConfigError(f"{where} has no name; add one, because requests select a model by name")
    where = f"{where} ({name})"
    path = _typed(fields, "model_path", str, where) or hf_checkpoint
    same = path.rstrip("/") == hf_checkpoint.rstrip("/")
    path = hf_checkpoint if same else path
    update = _typed(fields, "update_weights", bool, where)
    if update and not same:
        raise ConfigError(
            f"{where} has update_weights, but its model_path {path} is not --hf-checkpoint {hf_checkpoint}: the "
            "trainer has no weights for it; drop one of the two"
        )
    if "server_groups" in fields and "engine_groups" in fields:
        raise ConfigError(f"{where} has server_groups and engine_groups, which are synonyms; keep one")
    groups = fields.get("server_groups", fields.get("engine_groups"))
    if not isinstance(groups, list) or not groups:
        raise ConfigError(f"{where} has no server_groups; add a list of entries with num_gpus")
    width = _positive(fields, "num_gpus_per_engine", where) or width
    made = tuple(_group(group, f"{where}.server_groups[{i}]", width) for i, group in enumerate(groups))
    model = ServedModel(name, path, made, trained=same if update is None else update)
    _require_engines(model, where)
    return model


def _group(entry: Any, where: str, width: int) -> EngineGroup:
    fields = _known(entry, _GROUP_KEYS, where)
    kind = _typed(fields, "worker_type", str, where) or Worker.REGULAR.value
    if kind not in {worker.value for worker in Worker}:
        raise ConfigError(f"{where} has the worker_type {kind!r}; choose from {', '.join(w.value for w in Worker)}")
    worker = Worker(kind)
    if worker is Worker.ENCODER:
        raise ConfigError(
            f"{where} has the worker_type encoder, which this release does not support; use regular engines, which "
            "encode images themselves"
        )
    num_gpus = _positive(fields, "num_gpus", where)
    if num_gpus is None:
        raise ConfigError(f"{where} has no num_gpus; set it to the total number of GPUs of the group's engines")
    each = _positive(fields, "num_gpus_per_engine", where) or (1 if worker is Worker.PLACEHOLDER else width)
    if num_gpus % each:
        raise ConfigError(f"{where}: num_gpus {num_gpus} is not a multiple of num_gpus_per_engine {each}; change one")
    return EngineGroup(num_gpus, each, worker, _overrides(fields.get("overrides") or {}, f"{where}.overrides"), where)


def _overrides(given: Any, where: str) -> dict[str, Any]:
    """Returns the overridden ServerArgs by field name, type-checked."""
    from slime.settings.schema import OWNED, flags_of_owner

    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}, but must be a mapping of ServerArgs by name")
    flags: dict[str, Flag] = {flag.dest: flag for flag in flags_of_owner("sglang")}
    out = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name in OWNED["sglang"]:
            raise ConfigError(f"{where}: slime sets {key} itself; {OWNED['sglang'][name]}")
        if name in _OF_ALL:
            raise ConfigError(f"{where}: all engines of a run share {key}: {_OF_ALL[name]}")
        if name not in flags:
            raise ConfigError(f"{where}: SGLang has no setting {key!r}; see --help sglang")
        out[name] = coerce(flags[name], value, where=f"{where}.{key}")
    return out


def _require_engines(model: ServedModel, where: str) -> None:
    workers = {group.worker for group in model.groups if group.runs}
    if not workers:
        raise ConfigError(f"{where} has only placeholders, so no engine would serve the model; add a different group")
    if not model.in_pairs:
        return
    if Worker.REGULAR in workers:
        raise ConfigError(
            f"{where} mixes regular groups with prefill and decode groups, but a model's router sends requests either "
            "to single engines or to pairs; use one kind, or serve the others as a separate model"
        )
    if absent := [worker.value for worker in PAIRED if worker not in workers]:
        raise ConfigError(
            f"{where} has no {absent[0]} group, but prefill and decode engines work in pairs; add one, or make all "
            "groups regular"
        )


def _known(mapping: Any, known: set[str], where: str) -> dict[str, Any]:
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where} is {mapping!r}, but must be a mapping; known keys are {', '.join(sorted(known))}")
    for key in mapping:
        if key not in known:
            raise ConfigError(f"{where} has the unknown key {key!r}; choose from {', '.join(sorted(known))}")
    return dict(mapping)


_WANTED: Mapping[type, str] = {str: "text", bool: "true or false"}


def _typed(fields: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = fields.get(key)
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{where}.{key} is {value!r}, but must be {_WANTED[kind]}")
    return value


def _positive(fields: Mapping[str, Any], key: str, where: str) -> int | None:
    value = fields.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{where}.{key} is {value!r}, but must be an integer of at least 1")
    return value


STAGES_ENV = "SGLANG_PP_LAYER_PARTITION"
"""Environment variable from which SGLang reads the layers per pipeline stage. A run applies it to the policy."""


def layout_of(num_gpus: int, sglang: Mapping[str, Any], *, trained: bool = True) -> EngineLayout:
    """Returns the layout of an engine with `num_gpus` GPUs.

    `sglang` holds ServerArgs by field name; `trained` is whether the engine serves the policy. Raises `ConfigError` for
    sizes that do not divide each other.
    """
    pp_size, dp_size = int(sglang.get("pp_size") or 1), int(sglang.get("attn_dp_size") or sglang.get("dp_size") or 1)
    if num_gpus < 1 or pp_size < 1 or num_gpus % pp_size:
        raise ConfigError(
            f"sglang_pp_size {pp_size} does not divide the {num_gpus} GPUs of an engine into equal stages; choose a "
            "divisor"
        )
    if dp_size > 1 and not (sglang.get("enable_dp_attention") or sglang.get("attn_dp_size")):
        raise ConfigError(
            f"sglang_dp_size {dp_size} needs --sglang-enable-dp-attention, because each replica of a model is a "
            "separate engine; drop it, and add GPUs to get more engines"
        )
    tp_size, dense = num_gpus // pp_size, sglang.get("moe_dense_tp_size")
    if dense not in (None, 1, tp_size):
        raise ConfigError(f"sglang_moe_dense_tp_size is {dense}, but must be 1 or {tp_size} (the default)")
    return EngineLayout(
        tp_size=tp_size,
        pp_size=pp_size,
        dp_size=dp_size,
        ep_size=int(sglang.get("ep_size") or 1),
        dp_lm_head=dp_size > 1 and bool(sglang.get("enable_dp_lm_head")),
        whole_dense_mlp=dense == 1 and tp_size > 1,
        stage_layers=_stages(os.environ.get(STAGES_ENV)) if pp_size > 1 and trained else (),
        draft=bool(sglang.get("speculative_algorithm")),
    )


def layout_of_group(args: Args, model: ServedModel, group: EngineGroup) -> EngineLayout:
    """Returns the layout of a group's engines. Raises the errors of `layout_of`."""
    return layout_of(group.num_gpus_per_engine, settings_of_group(args, group), trained=model.trained)


def settings_of_group(args: Args, group: EngineGroup) -> dict[str, Any]:
    """Returns the run's ServerArgs by field name, with the group's overrides."""
    return {**args.sglang, **group.overrides}


def server_settings(layout: EngineLayout) -> dict[str, Any]:
    """Returns the ServerArgs of a layout by field name: `tp_size`, and all that differ from SGLang's defaults."""
    settings: dict[str, Any] = {"tp_size": layout.tp_size}
    if layout.pp_size > 1:
        settings["pp_size"] = layout.pp_size
    if layout.dp_size > 1:
        settings |= _dp_attention(layout.dp_size)
        settings |= {"enable_dp_lm_head": True} if layout.dp_lm_head else {}
    if layout.ep_size > 1:
        settings["ep_size"] = layout.ep_size
    if layout.whole_dense_mlp:
        settings["moe_dense_tp_size"] = 1
    return settings


def _dp_attention(dp_size: int) -> dict[str, Any]:
    if is_installed("sglang", BEFORE_SESSIONS):
        return {"dp_size": dp_size, "enable_dp_attention": True}
    return {"attn_dp_size": dp_size}


def contradictions(layout: EngineLayout, sglang: Mapping[str, Any]) -> list[str]:
    """Returns the names of ServerArgs that the user set and that contradict the layout."""
    own = {**_PLAIN, "moe_dense_tp_size": layout.tp_size, **server_settings(layout)}
    if layout.dp_size > 1:  # both ways to request DP attention are equivalent
        own |= {"dp_size": layout.dp_size, "attn_dp_size": layout.dp_size, "enable_dp_attention": True}
    # SGLang ignores these if dp_size is 1.
    idle = () if layout.dp_size > 1 else ("enable_dp_attention", "enable_dp_lm_head")
    given = {name: value for name, value in sglang.items() if name in own and value is not None}
    return sorted(name for name, value in given.items() if value != own[name] and name not in idle)


_PLAIN: Mapping[str, Any] = {
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "ep_size": 1,
    "enable_dp_attention": False,
    "enable_dp_lm_head": False,
}
"""ServerArgs of the layout -> SGLang's default."""
LAYOUT_SETTINGS = frozenset({*_PLAIN, "moe_dense_tp_size"})


def _stages(given: str | None) -> tuple[int, ...]:
    if not given:
        return ()
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise ConfigError(
            f"{STAGES_ENV} in the environment is {given!r}; list each pipeline stage's layer count, as in 14,14"
        ) from None


# --- Addresses of external engines, given as flags or in a file: one HOST:PORT per line, `#` starts a comment

FILE_MARK = "@"


def address_file(given: Sequence[str]) -> Path | None:
    """Returns FILE from `--rollout-external-engine-addrs @FILE`, or None. Raises `ConfigError` if addresses follow."""
    files = [word for word in given if word.startswith(FILE_MARK)]
    if not files:
        return None
    if len(given) > 1:
        raise ConfigError(
            f"--rollout-external-engine-addrs {' '.join(given)} names both a file and addresses; use either one file "
            "or addresses"
        )
    return Path(files[0].removeprefix(FILE_MARK))


def read_addresses(given: Sequence[str]) -> tuple[str, ...]:
    """Returns the current addresses, each as `http://host:port`.

    Reads the file again on every call, because it may change during a run. Raises `ConfigError` with the location of an
    invalid address.
    """
    file = address_file(given)
    if file is None:
        return _distinct([(word, "--rollout-external-engine-addrs") for word in given])
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rollout-external-engine-addrs {given[0]} cannot be read: {error}") from error
    words = [(line.partition("#")[0].strip(), f"{file}:{number}") for number, line in enumerate(lines, 1)]
    found = _distinct([(word, where) for word, where in words if word])
    if not found:
        raise ConfigError(f"{file} has no address; write one HOST:PORT per line")
    return found


def _distinct(words: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    found: list[str] = []
    for word, where in words:
        try:
            url = server_url(word)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if url in found:
            raise ConfigError(f"{where}: the address {word} occurs twice; drop one of them")
        found.append(url)
    return tuple(found)
