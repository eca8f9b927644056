"""The launcher. `python -m slime.serving.launch <SGLang arguments>` runs a server, or sglang-router if the first
argument is `--router`. If that is `--token-versions`, the server's responses contain the weight version of each token.

SGLang starts its schedulers and detokenizer with multiprocessing's "spawn", which re-imports the main module as
`__mp_main__`. So `prepare_process` runs in the server and in each of its child processes. On a CPU, children are forked
instead (`slime.compat.sglang_cpu.forked_children`).

Invariants
1. A normal import of this module has no side effects.
2. The server, the router and their children get SIGKILL when the slime process that started them exits. A manually
   started server (`--rollout-external-engine-addrs`) keeps running, and its children exit with it.
3. Keys come from the environment and never appear in a log, a response or a child process. Every route except the
   health checks requires a key, and routes that change state require the admin key (`slime.compat.sglang_security`).
4. On a GPU machine, SGLang and torch are modified only through SGLang's plugin hooks and through classes registered
   with transformers (`sglang_config_names`).
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


class Secret(str):
    """A key that `repr` masks and that copy and pickle replace with a random string.

    SGLang logs the `repr` of its arguments, passes them to its children and returns them in `/server_info`. Without
    this class, any client with the generation key could read the admin key that protects the weights.
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
"""Bearer token of a server or router. Not a flag, because every user of the host can read command lines."""
ADMIN_KEY_ENV = "SLIME_ENGINE_ADMIN_API_KEY"
"""Bearer token of routes that change state. Without it, these routes require the regular token."""
SECRET_FLAGS_ENV = "SLIME_SECRET_FLAGS"
"""Environment variable with all other secret flags, as a JSON list."""


def prepare_process(arguments: list[str], expected_parent: int | None) -> None:
    """Prepares this process (the server or one of its children). Call it before SGLang is imported."""
    from slime.compat.sglang_patches import patch_sglang

    if expected_parent is not None:
        die_with_parent(expected_parent)
    patch_sglang(arguments, token_versions=arguments[:1] == [TOKEN_VERSIONS_FLAG])


def serve(arguments: list[str], secret: list[str]) -> None:
    """Runs the SGLang server in this process until it exits. `secret`: extra arguments that the server never shows."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from slime.compat import sglang_security

    load_plugins()
    missing = HookRegistry._hooks.keys() - HookRegistry._patched  # SGLang only logs a warning
    if missing:
        raise EngineError(f"this SGLang lacks {sorted(missing)}, which slime hooks; install the pinned version")
    settings = prepare_server_args([*(a for a in arguments if a != TOKEN_VERSIONS_FLAG), *secret])
    settings._launch_command = " ".join(arguments)  # `/server_info` of SGLang 0.5.23 shows it to every client
    for name in ("api_key", "admin_api_key", "ssl_keyfile_password"):
        if getattr(settings, name, None):
            setattr(settings, name, Secret(getattr(settings, name)))
    os.environ.setdefault(sglang_security.MEETING_ENV, sglang_security.meeting_place(settings))
    sglang_security.close_routes()
    try:
        run_server(settings)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def route(arguments: list[str]) -> None:
    """Runs sglang-router in this process until it exits. The router's own launcher would also import SGLang and torch
    for a load balancer that slime does not use."""
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
    serve(arguments, [*key, *(["--admin-api-key", admin_key] if admin_key else [])])


if __name__ == "__mp_main__":
    import multiprocessing

    _parent = multiprocessing.parent_process()
    prepare_process(sys.argv[1:], _parent.pid if _parent else None)
elif __name__ == "__main__":
    main()
