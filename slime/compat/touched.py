"""Lists everything that slime uses from SGLang, sglang-router, Megatron-core, Ray and transformers, and checks it
against the installed versions: imported names, hooked functions, HTTP routes with the fields that slime sends, and
settings.

    python -m slime.compat.touched      prints the findings as JSON; `slime upgrade-check` runs it in a candidate's venv

The list is generated. Names come from slime's import statements, routes and fields from the calls that
`HttpEngineControl` makes to a recording transport, and arguments of hooked functions from the hooks themselves.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import sys
import typing
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slime.compat import Hook

UPSTREAM = ("sglang", "sglang_router", "megatron", "ray", "transformers")
"""Packages whose names are checked."""


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    """"name", "hook", "route" or "setting"."""
    what: str
    problem: str = ""
    """Empty if there is none."""


def imported_names(package: Path, left_out: Container[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields (module, name) for every import of an upstream package under a folder. The name is empty for a module.

    `left_out`: relative paths of files that the installed versions do not need.
    """
    seen = set()
    for file in sorted(package.rglob("*.py")):
        if str(file.relative_to(package)) in left_out:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            found = []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found = [(node.module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                found = [(alias.name, "") for alias in node.names]
            for module, name in found:
                if module.partition(".")[0] in UPSTREAM and (module, name) not in seen:
                    seen.add((module, name))
                    yield module, name


def try_name(module: str, name: str) -> Finding:
    what = f"{module}.{name}" if name else module
    try:
        loaded = importlib.import_module(module)
        if name and not hasattr(loaded, name):
            importlib.import_module(what)
    except Exception as error:
        return Finding("name", what, f"{type(error).__name__}: {error}"[:300])
    return Finding("name", what)


def hooks_of(package: str = "slime.compat") -> Iterator[tuple[str, Hook]]:
    """Yields (module, hook) for every hook in a package's modules."""
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if name.endswith("HOOKS"):
                yield from ((info.name, hook) for hook in value)


def resolve(target: str) -> Any:
    """Returns the object with this full name. Raises `AttributeError` or `ImportError`."""
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"no module of {target} exists")


def try_hook(module: str, hook: Hook) -> Finding | None:
    """Checks that a hook fits its target. Returns None if the installed SGLang does not need the hook."""
    if not hook.is_needed:
        return None
    what = f"{module.rpartition('.')[2]}: {hook.target}"
    try:
        original = resolve(hook.target)
    except Exception as error:
        return Finding("hook", what, f"{type(error).__name__}: {error}"[:300])
    return Finding("hook", what, _misfit(hook.when, hook.function, original))


def _misfit(when: str, function: Callable[..., Any], original: Callable[..., Any]) -> str:
    """Returns why a hook cannot be called with its target's arguments. Empty if it can."""
    theirs = list(inspect.signature(original).parameters.values())
    ours = list(inspect.signature(function).parameters.values())
    if when in ("AFTER", "AROUND") and ours[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        ours = ours[1:]  # the result, or the original function
    ours_by_place = [p for p in ours if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in ours), any(p.kind is p.VAR_KEYWORD for p in ours)
    by_place = [p for p in theirs if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name for p in theirs if p.kind is p.KEYWORD_ONLY}
    needed = [p for p in ours_by_place if p.default is p.empty]
    if len(needed) > len(by_place) and not any(p.kind is p.VAR_POSITIONAL for p in theirs):
        return f"the hook requires {len(needed)} positional arguments, but the function has {len(by_place)}"
    if missing := [p.name for p in ours if p.kind is p.KEYWORD_ONLY and p.default is p.empty and not _has(theirs, p)]:
        return f"the function no longer has the arguments {', '.join(missing)}"
    if len(by_place) > len(ours_by_place) and not takes_all[0]:
        extra = [p.name for p in by_place[len(ours_by_place) :] if p.default is p.empty]
        if extra:
            return f"the function has new positional arguments: {', '.join(extra)}"
    own = {p.name for p in ours}
    if (unknown := sorted(named - own)) and not takes_all[1]:
        return f"the function has new keyword-only arguments: {', '.join(unknown)}"
    return ""


def _has(theirs: list[inspect.Parameter], ours: inspect.Parameter) -> bool:
    return any(p.name == ours.name or p.kind is p.VAR_KEYWORD for p in theirs)


def sent_by_control(version: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns (method, path, body fields) of every control call to an engine of this version."""
    from slime.core.engine_interface import BEFORE_SESSIONS, matches, parsed
    from slime.core.topology import ONE_RANK
    from slime.serving.control import Connections, HttpEngineControl, Response

    sent: dict[tuple[str, str], set[str]] = {}

    class Recorded(Connections):
        def request(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Response:
            if path == "/begin_weight_update" and matches(parsed(version), BEFORE_SESSIONS):
                return Response(404, b"")
            sent.setdefault((method, path), set()).update(json.loads(body) if body else {})
            place = {"pp_rank": 0, "tp_rank": 0, "tp_size": 1, "pp_size": 1, "dp_size": 1}
            ranks = [{"checksums": {}, "parallelism_info": place}]
            return Response(200, json.dumps({"version": version, "success": True, "ranks": ranks}).encode())

    control = HttpEngineControl("http://engine", ONE_RANK, 1.0)
    control._connections = Recorded("http://engine", 1.0)
    for call in _calls(control):
        call()
    return [(method, path, tuple(sorted(fields))) for (method, path), fields in sorted(sent.items())]


def _calls(control: Any) -> Iterator[Callable[[], object]]:
    update = {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": 1}
    shapes: dict[str, Any] = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g"}
    meeting = {"master_address": "a", "master_port": 1, "rank_offset": 0, "world_size": 1, "backend": "gloo"}
    yield control.flush_cache
    for mode in ("abort", "retract", "in_place"):
        yield partial(control.pause, mode)
    yield control.begin_update
    yield control.end_update
    yield lambda: control.update_weights_from_tensor(["p"], **update)
    yield lambda: control.init_weights_update_group(group_name="g", **meeting)
    yield lambda: control.update_weights_from_distributed(**shapes, **update)
    yield lambda: control.destroy_weights_update_group(group_name="g")
    yield lambda: control.update_weights_from_disk(model_path="m", flush_cache=False, weight_version=1)
    yield control.weight_checksums
    yield lambda: control.release_memory(["weights"])
    yield lambda: control.resume_memory(["weights"])
    yield lambda: control.start_profile("d", "n", num_passes=1, shapes=False, stack=False)
    yield control.resume


OTHER_ROUTES = (
    ("POST", "/generate", ("input_ids", "sampling_params", "return_logprob", "stream", "rid", "logprob_start_len")),
    ("POST", "/generate", ("return_routed_experts", "routed_experts_start_len", "image_data", "top_logprobs_num")),
    ("POST", "/abort_request", ("rid", "abort_all")),
    ("GET", "/server_info", ()),
    ("GET", "/model_info", ()),
    ("GET", "/health", ()),
)
"""Routes used by the client and the watch: (method, path, body fields)."""


def try_routes(version: str) -> Iterator[Finding]:
    """Checks that SGLang's server has every route that slime calls, accepts every field that slime sends, and requires
    no other field.
    """
    from sglang.srt.entrypoints import http_server

    routes = {(m, r.path): r for r in http_server.app.routes for m in getattr(r, "methods", None) or ()}
    for method, path, fields in (*sent_by_control(version), *OTHER_ROUTES):
        route = routes.get((method, path))
        if route is None:
            yield Finding("route", f"{method} {path}", "SGLang has no such route")
            continue
        known = _fields_of(route.endpoint)
        missing = [] if known is None else sorted(set(fields) - known.keys())
        unsent = [name for name, required in (known or {}).items() if required and name not in fields]
        problems = [f"unknown fields: {', '.join(missing)}"] * bool(missing)
        problems += [f"requires fields that slime does not send: {', '.join(unsent)}"] * bool(unsent)
        yield Finding("route", f"{method} {path} {'+'.join(fields)}", "; ".join(problems))


def _fields_of(endpoint: Callable[..., Any]) -> dict[str, bool] | None:
    """Returns the body fields that a route accepts -> whether it requires them; None if they cannot be determined."""
    for name, kind in typing.get_type_hints(endpoint).items():
        for candidate in typing.get_args(kind) or (kind,):
            if name != "return" and (found := _fields(candidate)) is not None:
                return found
    return None


def _fields(kind: Any) -> dict[str, bool] | None:
    """Returns, for each field of a dataclass, a pydantic model or a msgspec struct, whether it is required."""
    if hasattr(kind, "__struct_fields__"):
        num_optional = len(kind.__struct_defaults__)
        names = kind.__struct_fields__
        return {name: i < len(names) - num_optional for i, name in enumerate(names)}
    if hasattr(kind, "model_fields"):
        return {name: field.is_required() for name, field in kind.model_fields.items()}
    if dataclasses.is_dataclass(kind):
        nothing = dataclasses.MISSING
        return {
            f.name: f.default is nothing and f.default_factory is nothing for f in dataclasses.fields(kind) if f.init
        }
    return None


def settings() -> dict[str, dict[str, list[str]]]:
    """Returns owner -> {"came": ..., "went": ...}: flags added and removed since the newest version whose
    flags are on record.

    Both are empty if the installed version has its own list.
    """
    from slime.cli import schemas
    from slime.core.engine_interface import WINDOW, installed
    from slime.settings.schema import PACKAGES, SCHEMA_DIR

    out = {}
    for owner, build in (("sglang", schemas.build_sglang), ("megatron", schemas.build)):
        versions = (installed(PACKAGES[owner]), *reversed(WINDOW[PACKAGES[owner]]))
        files = [SCHEMA_DIR / f"{owner}-{version}.json" for version in versions]
        file = next(file for file in files if file.is_file())
        old = {flag["dest"] for flag in json.loads(file.read_text())["flags"]}
        new = {flag["dest"] for flag in build()["flags"]}
        out[owner] = {"came": sorted(new - old), "went": sorted(old - new)}
    return out


def findings() -> dict[str, Any]:
    """Returns the results of all checks, as JSON data."""
    import torch

    import slime
    from slime.compat import megatron_cpu
    from slime.compat.sglang_cpu import activate

    device = "cuda" if torch.cuda.is_available() else "cpu"  # a host with GPUs may have the CPU build of torch
    found: list[Finding] = []
    patches: list[dict[str, Any]] = []
    for apply in (activate, megatron_cpu.activate):
        try:
            patches += [asdict(report) for report in apply(device)]
        except Exception as error:
            found.append(Finding("patch", apply.__module__, f"{type(error).__name__}: {error}"[:300]))
    import sglang

    hooks = list(hooks_of())
    found += [finding for module, hook in hooks if (finding := try_hook(module, hook)) is not None]
    unneeded = sorted({f"{m.rpartition('.')[2]}: {h.target}" for m, h in hooks if not h.is_needed})
    found += list(try_routes(sglang.__version__))
    needed = {module for module, hook in hooks if hook.is_needed}
    unused = {f"{module.partition('.')[2].replace('.', '/')}.py" for module, _ in hooks if module not in needed}
    package = Path(os.path.dirname(slime.__file__))
    found += [try_name(module, name) for module, name in imported_names(package, unused)]
    try:
        changed = settings()
    except Exception as error:
        changed = {}
        found.append(Finding("setting", "flags of the engines", f"{type(error).__name__}: {error}"[:300]))
    return {
        "findings": [asdict(finding) for finding in found],
        "hooks that can go": unneeded,
        "patches that can go": [p["name"] for p in patches if not p["applied"]],
        "settings": changed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks what slime uses of the installed engines; prints JSON.")
    parser.add_argument("--output", type=Path, help="write the JSON to this file; engines print to standard output")
    options = parser.parse_args()
    text = json.dumps(findings(), indent=1)
    options.output.write_text(text) if options.output else sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
