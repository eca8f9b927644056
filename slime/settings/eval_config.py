"""Evaluation datasets and how they are sampled, from `--eval-prompt-data` or a `--eval-config` file.

    eval:
      defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
      datasets:                                  # a list of named entries, or a mapping by name
        - {name: aime, path: aime.jsonl, rm_type: math}

A setting is taken from the dataset's entry, else from `defaults`, else from the command line. Names and types are
checked as strictly as flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.user_files import read_yaml
from slime.settings.data_files import grader_of_data
from slime.settings.fields import flags_of, opt
from slime.settings.flag_parser import FlagTable
from slime.settings.flags import Flag, coerce

if TYPE_CHECKING:
    from slime.settings.args import Args


@dataclass(frozen=True, kw_only=True)
class EvalDatasetConfig:
    """One evaluation dataset and how it is sampled. `_SETTINGS` lists the settings that supply default values."""

    name: str
    """Unique, because metrics are named `eval/<name>`."""
    path: str
    """A file, folder, glob or scheme, with an optional `@[start:stop]`, like `--prompt-data`."""
    rm_type: str | None = None
    """Grader for rows whose metadata does not name one."""
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] | None = None
    """Metadata entries to set in each row."""
    input_key: str
    label_key: str | None
    tool_key: str | None
    metadata_key: str | None
    apply_chat_template: bool
    apply_chat_template_kwargs: dict[str, Any] | None
    max_prompt_len: int | None
    """In tokens; longer prompts are dropped. At most `max_context_len - 1` if the file sets `max_context_len`."""
    n_samples_per_eval_prompt: int
    """Executions per prompt. pass@k is reported for each power of two up to this number."""
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    max_total_response_len: int | None
    max_context_len: int | None
    min_new_tokens: int | None
    repetition_penalty: float | None = None
    """1.0 is off."""
    eval_task_timeout: float | None = opt(None, gt=0)
    """Seconds that the dataset's evaluation may take. What has not finished by then is dropped and counted."""
    min_eval_samples: int | None = opt(None, ge=1)
    """With fewer scored executions, the dataset has no score, and a warning says so."""
    stop: tuple[str, ...] | None
    stop_token_ids: tuple[int, ...] | None
    skip_special_tokens: bool


_SETTINGS = {
    name.removeprefix("eval_").removeprefix("rollout_"): name
    for name in (
        *("eval_input_key", "eval_label_key", "eval_tool_key", "metadata_key"),
        *("apply_chat_template", "apply_chat_template_kwargs", "n_samples_per_eval_prompt"),
        *("eval_temperature", "eval_top_p", "eval_top_k", "eval_max_prompt_len", "eval_max_response_len"),
        *("eval_max_total_response_len", "eval_max_context_len", "eval_min_new_tokens"),
        *("rollout_stop", "rollout_stop_token_ids", "rollout_skip_special_tokens"),
    )
}
"""Field -> the setting that supplies its default value."""


def eval_datasets(args: Args) -> tuple[EvalDatasetConfig, ...]:
    """Returns the evaluation datasets that `args` names. Raises `ConfigError` for an invalid file."""
    common = {field: getattr(args, setting) for field, setting in _SETTINGS.items()}
    defaults: dict[str, Any] = {}
    if args.eval_config is None:
        data = args.eval_prompt_data or ()
        entries = [{"name": name, "path": file} for name, file in zip(data[0::2], data[1::2], strict=False)]
    else:
        defaults, entries = _read(args.eval_config)
    names = [entry["name"] for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"several evaluation datasets are named {twice[0]!r} and would share metrics; rename one")
    made = []
    for entry in entries:
        own = defaults | entry
        settings = {"rm_type": _grader_of(entry["path"], args), **common, **own}
        if own.get("max_context_len") is not None and "max_prompt_len" not in own:
            left = own["max_context_len"] - 1
            given = common["max_prompt_len"] if args.was_given("eval_max_prompt_len") else None
            settings["max_prompt_len"] = left if given is None else min(left, given)
        made.append(EvalDatasetConfig(**settings))
    return tuple(made)


def _grader_of(path: str, args: Args) -> str | None:
    """Returns the scheme's grader, or None if the prompt data has the same one, so that the run's grader applies."""
    grader = grader_of_data(path)
    return None if grader == grader_of_data(args.prompt_data) else grader


def _read(file: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the defaults and the dataset entries of the file, type-checked. Raises `ConfigError`."""
    top = _typed(read_yaml(file, "--eval-config"), {"eval"}, file).get("eval")
    top = _typed(top, {"defaults", "datasets"}, f"{file}: eval")
    known = {field.name for field in dataclasses.fields(EvalDatasetConfig)}
    datasets = top.get("datasets") or []
    if isinstance(datasets, dict):
        datasets = [{"name": name, **_entry(one, f"{file}: eval.datasets.{name}")} for name, one in datasets.items()]
    if not isinstance(datasets, list) or not datasets:
        raise ConfigError(f"{file} has no eval.datasets; add a list of entries with name and path")
    entries = [
        _typed(entry, known, f"{file}: eval.datasets[{i}]", may_be_unread=True) for i, entry in enumerate(datasets)
    ]
    for i, entry in enumerate(entries):
        if not {"name", "path"} <= entry.keys():
            raise ConfigError(f"{file}: eval.datasets[{i}] has no name or no path; set both")
    where = f"{file}: eval.defaults"
    defaults = _typed(top.get("defaults") or {}, known - {"name", "path"}, where, may_be_unread=True)
    return defaults, entries


def unread_keys(args: Args) -> dict[str, str]:
    """Returns the keys of --eval-config that nothing reads, each with its value and the reason.

    Empty for an invalid file, which `eval_datasets` reports.
    """
    if args.eval_config is None:
        return {}
    try:
        eval_datasets(args)
    except ConfigError:
        return {}
    top = read_yaml(args.eval_config, "--eval-config")["eval"]
    datasets = top["datasets"].values() if isinstance(top["datasets"], dict) else top["datasets"]
    known = {field.name for field in dataclasses.fields(EvalDatasetConfig)}
    maps = [top.get("defaults") or {}, *(entry or {} for entry in datasets)]
    return {
        f"eval_config.{key}": f"{value}, which nothing reads"
        for one in maps
        for key, value in one.items()
        if key not in known
    }


def _entry(found: Any, where: str) -> Mapping[str, Any]:
    """Returns the entry under a dataset's name. Raises `ConfigError` if it is not a mapping."""
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError(f"{where} is {found!r}, but must be a mapping, such as path: FILE")
    return found or {}


@cache
def _flags() -> tuple[Flag, ...]:
    """Returns the fields as flags. Each number has the range of the setting that supplies its default."""
    from slime.settings.all_flags import own_flags  # avoids a circular import

    limits = {field: flag.limits for flag in own_flags() for field, name in _SETTINGS.items() if name == flag.dest}
    return tuple(
        dataclasses.replace(flag, limits=limits.get(flag.dest, flag.limits))
        for flag in flags_of(EvalDatasetConfig, heading="")
    )


def _typed(mapping: Any, known: set[str], where: str, *, may_be_unread: bool = False) -> dict[str, Any]:
    """Returns the known keys with converted values. Raises `ConfigError` for an unknown key or a wrong type.

    `may_be_unread`: an unknown key that is not like a known one is left out; `unread_keys` lists it.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where} is {mapping!r}, but must be a mapping; write `eval:` with defaults and datasets")
    table = FlagTable(_flags())
    flags = {flag.dest: flag for flag in table.flags}
    for key in mapping:
        if key not in known:
            near = table.nearest("--" + str(key).replace("_", "-"))
            if may_be_unread and near is None:
                continue
            hint = f"did you mean {near[2:].replace('-', '_')}? " if near else ""
            raise ConfigError(f"{where} has the unknown key {key!r}; {hint}choose from {', '.join(sorted(known))}")
    return {k: coerce(flags[k], v, where=f"{where}.{k}") if k in flags else v for k, v in mapping.items() if k in known}
