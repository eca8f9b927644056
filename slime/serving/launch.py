"""The launcher: `python -m slime.serving.launch <SGLang arguments>`, and with `--router` first, sglang-router.

With `--token-versions` first the server tells the weight version of each token (`slime.compat.sglang_token_versions`);
with SGLang's `--enable-return-routed-experts` it reads from a request's id that they are wanted
(`slime.compat.sglang_routed_experts`). A server that has to wait for its memory does so with everything imported
(`slime.compat.sglang_memory_gate`).

SGLang makes its schedulers and its detokenizer with multiprocessing's "spawn", which imports the main module again,
under the name `__mp_main__`, before it looks at what the child is to run. That is the hook: the same few lines run in
the server and in every process below it, and no environment variable has to name a folder of stand-ins. On a CPU they
are copies of the server instead (`slime.compat.sglang_cpu.forked_children`).

Invariants
1. Imported under its own name, this module does nothing.
2. Server, router and their children get SIGKILL when the process of slime that started them ends, for whatever reason.
   A server that somebody started by hand stays (`--rollout-external-engine-addrs`); its children end with it.
3. Keys come from the environment, and are in no log, no answer and no child (`slime.serving.launch`). Every route but
   the health checks asks for one, and for the other one where it changes something (`slime.compat.sglang_closed`).
4. On a GPU machine nothing of SGLang or torch is patched, but by hooks that SGLang's plugin registry puts in place and
   by what is registered with transformers (`sglang_config_names`).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from typing import Any

from slime.core.errors import EngineError
from slime.core.processes import die_with_parent
from slime.core.text import HIDDEN

# `Secret`: a text that no record of settings shows, and no answer.
#
# SGLang writes its arguments, by their `repr`, to its log; hands them to its children; and answers `/server_info` with
# all of them, those of the children as well, so that whoever may generate would read the key to the weights.


class Secret(str):
    """Equal to the text, and used as it is, where it was made. What is copied or pickled is nobody's key: a text that
    cannot be guessed, so that a copy that is asked for in a request lets nobody in.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"'{HIDDEN}'"

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return _nobodys_key()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobodys_key, ()


def _nobodys_key() -> str:
    return f"{HIDDEN} {secrets.token_hex(16)}"


ROUTER_FLAG = "--router"
TOKEN_VERSIONS_FLAG = "--token-versions"
API_KEY_ENV = "SLIME_ENGINE_API_KEY"
"""Holds the bearer token of a server or the router: a command line is for everybody on the host to read, an environment
is not."""
ADMIN_KEY_ENV = "SLIME_ENGINE_ADMIN_API_KEY"
"""Holds what the server asks for where something is changed or ended; without it that is the other one."""


SECRET_FLAGS_ENV = "SLIME_SECRET_FLAGS"
"""Further flags that are nobody's to read, as a JSON list."""


def value_of(arguments: list[str], flag: str, default: str) -> str:
    """The value of a flag in SGLang's arguments."""
    for i, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
        if argument == flag and i + 1 < len(arguments):
            return arguments[i + 1]
    return default


def prepare_process(arguments: list[str], expected_parent: int | None) -> None:
    """What the server and each of its children needs before SGLang is imported."""
    from slime.compat import (
        sglang_closed,
        sglang_config_names,
        sglang_draft,
        sglang_flush_all,
        sglang_fresh_router,
        sglang_memory_gate,
        sglang_mutations,
        sglang_quantised,
        sglang_routed_experts,
        sglang_stages,
        sglang_taken_back,
        sglang_token_versions,
        sglang_version_prefixes,
    )
    from slime.compat.sglang_cpu import activate, forked_children

    if expected_parent is not None:
        die_with_parent(expected_parent)
    if activate(value_of(arguments, "--device", "cuda")):
        forked_children.register()
    if unnamed := sglang_config_names.unnamed_type(value_of(arguments, sglang_config_names.PATH_FLAG, "")):
        sglang_config_names.register(unnamed)
    sglang_closed.register()
    sglang_fresh_router.register()
    sglang_memory_gate.register()
    sglang_mutations.register()
    sglang_taken_back.register()
    if arguments[:1] == [TOKEN_VERSIONS_FLAG]:
        sglang_token_versions.register()
        sglang_version_prefixes.register()
    if sglang_routed_experts.FLAG in arguments:
        sglang_routed_experts.register()
    if value_of(arguments, sglang_draft.FLAG, ""):
        sglang_draft.register()
    if int(value_of(arguments, sglang_stages.FLAG, "1")) > 1:
        sglang_stages.register()
    if sglang_quantised.is_quantised(value_of(arguments, sglang_quantised.PATH_FLAG, "")):
        sglang_quantised.register()
    if sglang_flush_all.FLAG in arguments:
        sglang_flush_all.register()


def serve(arguments: list[str]) -> None:
    """Runs the SGLang server in this process until it ends."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from slime.compat import sglang_closed

    load_plugins()
    missing = HookRegistry._hooks.keys() - HookRegistry._patched  # SGLang logs it and goes on
    if missing:
        raise EngineError(f"got an SGLang without {sorted(missing)}, where hooks belong; install the pinned version")
    settings = prepare_server_args([a for a in arguments if a != TOKEN_VERSIONS_FLAG])
    for name in ("api_key", "admin_api_key"):
        if getattr(settings, name):
            setattr(settings, name, Secret(getattr(settings, name)))
    sglang_closed.close_routes()
    try:
        run_server(settings)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def route(arguments: list[str]) -> None:
    """Runs sglang-router in this process until it ends.

    Its own launcher would import SGLang and torch, for a balancer of its own that is not used.
    """
    import setproctitle
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    settings = RouterArgs.from_cli_args(parser.parse_args(arguments), use_router_prefix=False)
    setproctitle.setproctitle("sglang::router")
    settings._validate_router_args()
    Router.from_args(settings).start()


def main() -> None:
    """Entry point of the process that `slime.serving.child_process` starts."""
    from slime.serving.child_process import OWNER_ENV

    owner = os.environ.pop(OWNER_ENV, None)
    api_key, admin_key = os.environ.pop(API_KEY_ENV, None), os.environ.pop(ADMIN_KEY_ENV, None)
    key = ["--api-key", api_key] if api_key else []
    key += json.loads(os.environ.pop(SECRET_FLAGS_ENV, "[]"))
    arguments = sys.argv[1:]
    if arguments[:1] == [ROUTER_FLAG]:
        die_with_parent(int(owner) if owner else None)
        route([*arguments[1:], *key])
        return
    prepare_process(arguments, int(owner) if owner else None)
    serve([*arguments, *key, *(["--admin-api-key", admin_key] if admin_key else [])])


if __name__ == "__mp_main__":
    import multiprocessing

    _parent = multiprocessing.parent_process()
    prepare_process(sys.argv[1:], _parent.pid if _parent else None)
elif __name__ == "__main__":
    main()
