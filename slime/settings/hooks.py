"""User hooks: loading by path, and checking their signature against their contract before anything starts.

A path is `pkg.mod:fn`, `pkg.mod.fn` or `path/to/file.py:fn`. Loading a hook imports the user's module, so it happens
on request (`check_hooks` at start-up, `load_hook` where it is used), never while the command line is parsed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from slime.core.errors import HookError
from slime.core.registry import LoadingFailed, load_object
from slime.settings.args import Args
from slime.settings.eval_config import eval_datasets
from slime.settings.hook_contracts import CONTRACTS, HookContract


def load_hook(path: str, kind: str) -> Callable[..., Any]:
    """The function (or class) at `path`, checked against the contract of `kind` (a key of `CONTRACTS`).

    Raises `HookError` saying what was got and what is expected.
    """
    assert kind in CONTRACTS, f"no hook of kind {kind!r}; kinds are {sorted(CONTRACTS)}"
    contract = CONTRACTS[kind]
    hook = _find(path, contract)
    if contract.is_class:
        _check_class(hook, path, contract)
    else:
        _check_mode(hook, path, contract)
    _check_signature(hook, path, contract)
    result: Callable[..., Any] = hook
    return result


def accepts_keyword(hook: Callable[..., Any], name: str) -> bool:
    """Whether `hook` can be called with keyword `name` (for a contract's optional keywords)."""
    parameters = inspect.signature(hook).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def is_async(hook: Any) -> bool:
    """Whether a call of `hook` must be awaited."""
    plain = inspect.isroutine(hook) or inspect.isclass(hook) or isinstance(hook, functools.partial)
    call = hook if plain else type(hook).__call__
    return inspect.iscoroutinefunction(inspect.unwrap(call))


def check_hooks(args: Args) -> None:
    """Loads every configured hook once. Raises one `HookError` with all that is wrong."""
    problems, wanted = [], []
    for kind, contract in CONTRACTS.items():
        given = getattr(args, contract.flag)
        if contract.flag != "custom_rm_path" or (kind == "group_rm") == args.group_rm:
            wanted += [(path, kind) for path in (given if isinstance(given, tuple) else (given,))]
    for data in eval_datasets(args):
        wanted += [(data.custom_generate_function_path, "generate"), (data.custom_rm_path, "custom_rm")]
    for path, kind in wanted:
        try:
            if path is not None:
                load_hook(path, kind)
        except HookError as error:
            problems.append(str(error))
    if problems:
        raise HookError("\n  ".join(problems) if len(problems) == 1 else "\n  " + "\n  ".join(problems))


def _find(path: str, contract: HookContract) -> Any:
    """The object at `path`. Raises `HookError`."""
    flag = "--" + contract.flag.replace("_", "-")
    try:
        target = load_object(path)
    except LoadingFailed as error:
        raise HookError(f"{flag}: got {path}, but {error}") from error
    if not callable(target):
        raise HookError(f"{flag}: got {path}, which is a {type(target).__name__}; expected {contract.shape}")
    return target


def _check_mode(hook: Any, path: str, contract: HookContract) -> None:
    """Sync or async as the contract says."""
    waits = is_async(hook)
    if waits != {"sync": False, "async": True}.get(contract.mode, waits):
        got = "async" if waits else "not async"
        raise HookError(f"--{contract.flag.replace('_', '-')}: got {path}, which is {got}; expected {contract.shape}")


def _check_class(hook: Any, path: str, contract: HookContract) -> None:
    """A class with the methods of its contract."""
    flag = "--" + contract.flag.replace("_", "-")
    if not inspect.isclass(hook):
        raise HookError(f"{flag}: got {path}, which is a function; expected a {contract.shape}")
    missing = [m for m in contract.methods if not callable(getattr(hook, m, None))]
    if missing:
        raise HookError(f"{flag}: got {path}, which lacks {', '.join(missing)}; expected a {contract.shape}")


def _check_signature(hook: Any, path: str, contract: HookContract) -> None:
    """The hook can be called the way slime calls it."""
    try:
        signature = inspect.signature(hook)
    except ValueError:  # some builtins tell nothing; the call itself will
        return
    accepted = [name for name in contract.optional_keywords if accepts_keyword(hook, name)]
    try:
        signature.bind(*contract.positional, **dict.fromkeys((*contract.keywords, *accepted)))
    except TypeError as error:
        flag = "--" + contract.flag.replace("_", "-")
        raise HookError(
            f"{flag}: got {path}{signature}, which slime cannot call ({error}); expected {contract.shape}"
        ) from None
