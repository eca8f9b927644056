"""Every function that stands in a declaration runs on the settings of runs: a misspelt setting in one is found here."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.settings import resolve
from slime.settings.all_flags import components, flag_table
from slime.settings.fields import Declared, Passed, declared
from slime.settings.groups import GROUPS
from slime.settings.megatron import CONDITIONS
from slime.settings.resolve import Resolver, resolver_of

RUNS = (
    "",
    "--no-bf16 --device auto",
    "--fp16 --lr-warmup-fraction 0.5",
    "--loss-type sft_loss",
    "--advantage-estimator ppo --policy-loss sapo",
    "--policy-loss cispo --use-opsm --rejection-level token",
    "--use-tis --use-kl-loss --kl-loss-coef 0.1 --get-mismatch-metrics",
    "--custom-reward-post-process-path a.b --loss-aggregation constant_length --disable-grpo-std-normalization",
    "--eval-function-path a.b --custom-rm-path a.b",
    "--rollout-max-context-len 64 --num-steps-per-rollout 2 --calculate-per-token-loss",
    "--load-debug-rollout-data DATA --load-debug-rollout-data-subsample 0.5",
    "--device cuda --colocate",
    "--device cuda --offload",
    "--device cuda --fully-async --pause-generation-mode in_place",
    "--rollout-schedule fully_async --update-weight-transport disk",
    "--rollout-function-path slime.rollout.fully_async.generate_rollout_fully_async",
    "--rollout-function-path own.function --opd-teacher-url http://a:1 --use-opd --opd-type sglang",
    "EPOCHS",
    "NONE",
    "EXPERTS --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2",
)
"""Command lines under which, taken together, every derivation says something."""


def declarations() -> Iterator[tuple[str, Declared]]:
    """That of each setting; all of them where several entries declare one."""
    known = components()
    for name, field in known.own.items():
        yield name, declared(field)
    for name in known.of_entries():
        for reader in known.readers(name):
            yield f"{name} of {reader.label}", declared(reader.field)


def passed() -> Iterator[tuple[str, Passed]]:
    """What groups compute for engines."""
    for group in GROUPS:
        for rule in group.passed:
            yield f"{rule.owner}.{rule.name}", rule


def resolver(base: list[str], words: str) -> Resolver:
    """The settings of a command line."""
    argv = list(base)
    at = argv.index("--num-rollout")
    if "EPOCHS" in words:
        argv[at : at + 2] = ["--num-epoch", "2"]
    if "NONE" in words:
        argv = [*argv[: argv.index("--rollout-batch-size")], "--num-rollout", "0"]
    if "EXPERTS" in words:
        path = Path(base[1]) / "config.json"
        experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        path.write_text(json.dumps({**json.loads(path.read_text()), **experts}))
    for word in ("EPOCHS", "NONE", "EXPERTS"):
        words = words.replace(word, "")
    parsed = flag_table().parse([*argv, *words.replace("DATA", base[3]).split()])
    given = {dest if owner == "slime" else f"{owner}.{dest}": value for (owner, dest), value in parsed.items()}
    settings = resolver_of(components(), given, dict.fromkeys(given, "command line"))
    resolve.take_architecture(settings)
    return settings


def evaluated(label: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a declaration returns."""
    try:
        return function(*arguments)
    except Exception as error:
        raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("words", RUNS)
def test_conditions_and_derivations_can_be_computed(base: list[str], words: str) -> None:
    settings = resolver(base, words)
    for name, says in declarations():
        for need in says.conditions:
            evaluated(f"needs of {name}", need.acts, settings)
            assert need.text, name
        if says.compute is not None:
            evaluated(f"compute of {name}", says.compute, settings)
        if says.chosen_by is not None:
            evaluated(f"chosen_by of {name}", says.chosen_by.name, settings)
        if says.adjust is not None:
            evaluated(f"adjust of {name}", says.adjust, getattr(settings, name.partition(" of ")[0]), settings)
        if says.canonical is not None and says.default is not None:
            evaluated(f"canonical of {name}", says.canonical, says.default)
    for name, rule in passed():
        evaluated(f"compute of {name}", rule.compute, settings)
    for name, need in CONDITIONS.items():
        evaluated(f"needs of {name}", need.acts, settings)
    for name, need in resolve.ARCHITECTURE_NEEDS.items():
        evaluated(f"needs of {name}", need.acts, dict(settings.megatron))


def test_every_reason_is_told_in_one_of_the_runs(base: list[str]) -> None:
    reasons = [(name, says.compute, says.why) for name, says in declarations() if callable(says.why)]
    reasons += [(name, rule.compute, rule.why) for name, rule in passed() if callable(rule.why)]
    told: set[str] = set()
    for words in RUNS:
        settings = resolver(base, words)
        for name, compute, why in reasons:
            assert compute is not None and callable(why), name
            if compute(settings) is not None:
                assert evaluated(f"why of {name}", why, settings), name
                told.add(name)
    assert told == {name for name, _, _ in reasons}, "add a run in which it is derived"


def test_every_number_on_the_command_line_has_two_bounds_that_hold_for_its_default() -> None:
    """10^9 samples a prompt, a memory fraction of 7 and a limit of 1e-9 s are slips of the hand, whoever reads them."""
    numbers = [flag for flag in flag_table().flags if flag.kind.startswith(("int", "float", "human_int"))]
    entries = [(name, declared(r.field)) for name in components().of_entries() for r in components().readers(name)]
    limits = {flag.names[0]: flag.limits for flag in numbers if flag.dest not in components().of_entries()}
    hints = {name: typing.get_type_hints(components().readers(name)[0].entry)[name] for name, _ in entries}
    limits |= {name: says.range for name, says in entries if hints[name] in (int, float, int | None, float | None)}
    assert len(limits) > 300
    bounds = {n: ((one.gt, one.ge), (one.lt, one.le)) for n, one in limits.items()}
    assert [n for n, (low, high) in bounds.items() if low == (None, None) or high == (None, None)] == []
    defaults = [(f.names[0], f.limits, v) for f in numbers for v in (f.default if f.is_list else (f.default,)) or ()]
    assert [name for name, one, value in defaults if one.problem(value) is not None] == []
