"""Free keys of `--custom-config-path`: the user's own settings, which need a function of the user's to read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.settings.custom_yaml import FREE, NEAR
from slime.settings.hook_contracts import CONTRACTS

if TYPE_CHECKING:
    from slime.settings.args import Args


def free_keys_have_a_reader(args: Args) -> str | None:
    """What nothing could read is a misspelt setting."""
    found = {name.removeprefix(FREE): text for name, text in args.idle.items() if name.startswith(FREE)}
    if not found or _has_functions(args):
        return None
    name, text = next(iter(found.items()))
    got, _, near = text.partition(NEAR)
    hint = f"did you mean {near}? " if near else ""
    return (
        f"got {name}: {got} in {args.custom_config_path}, and the run has none; {hint}correct it, or put your own "
        "settings below `custom`"
    )


def _has_functions(args: Args) -> bool:
    """Whether the run calls code of the user's."""
    paths = [getattr(args, contract.flag) for contract in CONTRACTS.values()]
    flat = [path for one in paths for path in (one if isinstance(one, tuple) else (one,))]
    return any(path is not None and not str(path).startswith("slime.") for path in flat)
