"""`slime doctor`: checks whether this machine, or all hosts of a Ray cluster, can run slime, and how to fix problems.

An exception in a check is also a finding. Engines are imported in a separate process, so that a crash or a hang is
reported like any other problem.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import slime
from slime.core.cores import usable_cores
from slime.core.engine_interface import WINDOW
from slime.core.errors import ConfigError, DataError
from slime.core.processes import OF_LIBRARIES, SHORTER, longest_room, new_run_id, ray_folder, too_long
from slime.observability.run_folder import host_facts, versions

if TYPE_CHECKING:
    from slime.cluster.cluster_check import ClusterReport, HostReport

TESTED = {
    **WINDOW,
    "sglang-router": ("0.3.2",),
    "ray": ("2.60.0",),
    "transformers": ("5.12.1", "5.19.0"),
}
"""Package -> versions covered by the tests."""
MIN_MEMORY_BYTES = 11 * 10**9
"""The demo's processes used 9.6 GB at most, in the first training step (sum of their proportional set sizes)."""
MIN_SHM_BYTES = 1 << 30
IMPORT_LIMIT_S = 180
OK, WARN, FAIL = "ok", "warn", "FAIL"

SGLANG_CODE = (
    "from slime.compat.sglang_cpu import activate\n"
    "reports = activate({device!r})\n"
    "import sglang.srt.server_args\n"
    "print('; '.join(r.name for r in reports if r.applied) or 'no patch needed')"
)
MEGATRON_CODE = (
    "from slime.compat import megatron_cpu, megatron_gradients, megatron_moe\n"
    "reports = megatron_cpu.activate({device!r}) + megatron_moe.activate()\n"
    "reports += megatron_gradients.activate_norm({device!r}) + megatron_gradients.activate_weights({device!r})\n"
    "import megatron.core.models.gpt.gpt_model\n"
    "print('; '.join(r.name if r.took_effect else f'{{r.name}} (NOT in force)' for r in reports) or 'no patch needed')"
)
KERNELS_CODE = (
    "import torch\n"
    "from slime.ops.select import choose\n"
    "print('; '.join(map(str, choose(torch.device({device!r}), torch.bfloat16))))"
)


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: str
    """One of `OK`, `WARN`, `FAIL`."""
    detail: str
    """The result of the check and, if something is wrong, what to do."""


def check_versions() -> list[Finding]:
    found = versions()
    out = [Finding("python", OK if sys.version_info >= (3, 11) else FAIL, f"{found['python']} (3.11 or newer)")]
    for name, tested in TESTED.items():
        have = found[name]
        if have is None:
            out.append(Finding(name, FAIL, f"not installed; {how_to_install(name)}"))
        else:
            state = OK if have in tested else WARN
            out.append(Finding(name, state, have if have in tested else f"{have}; tested with {' and '.join(tested)}"))
    torch = found["torch"]
    return [*out, Finding("torch", OK if torch else FAIL, torch or f"not installed; {how_to_install('torch')}")]


def how_to_install(package: str, root: Path = Path(__file__).parents[2]) -> str:
    """Says how to install a missing package. `root`: the parent of the package `slime`."""
    if (root / "Makefile").is_file():
        return "run: make venv"
    wheel = f"slime-{slime.__version__}-py3-none-any.whl"
    on_cpu = f"pip install '{wheel}[cpu]'"
    if package == "sglang":
        on_cpu = f"pip install --no-deps sglang=={WINDOW['sglang'][-1]}"
    return f"on a CPU: {on_cpu}; on GPUs: pip install '{wheel}[gpu]'"


def check_device(device: str) -> Finding:
    num_gpus = int(host_facts()["num_gpus"])
    if device == "cuda" and not num_gpus:
        return Finding(
            "device",
            FAIL,
            "no GPU is visible (no /dev/nvidia*); use --device cpu, or give the container access to the GPUs",
        )
    chosen = "cuda" if num_gpus and device != "cpu" else "cpu"
    return Finding("device", OK, f"{chosen}; {num_gpus} GPUs, {usable_cores()} CPUs")


def check_memory() -> Finding:
    """Checks for enough free memory for the demo, which runs an engine and a trainer at the same time."""
    available = {
        key: int(value.split()[0]) << 10
        for key, _, value in (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())
        if value.endswith("kB")
    }["MemAvailable"]
    text = f"{available / 1e9:.1f} GB free"
    if available < MIN_MEMORY_BYTES:
        return Finding(
            "memory", WARN, f"{text}; the demo needs {MIN_MEMORY_BYTES // 10**9} GB: stop other programs first"
        )
    return Finding("memory", OK, text)


def check_shared_memory() -> Finding:
    """Checks the free space in /dev/shm, which holds Ray's objects and the tensors exchanged by trainer and engine."""
    free = shutil.disk_usage("/dev/shm").free
    text = f"{free / 2**30:.1f} GiB free in /dev/shm"
    if free < MIN_SHM_BYTES:
        return Finding(
            "shared memory", WARN, f"{text}; {MIN_SHM_BYTES >> 30} GiB is required (docker run --shm-size=8g)"
        )
    return Finding("shared memory", OK, text)


def check_disk() -> Finding:
    free = shutil.disk_usage(".").free
    return Finding("disk", OK if free > 5 << 30 else WARN, f"{free / 2**30:.0f} GiB free here; the demo writes 2 GiB")


def check_temporary_folder() -> Finding:
    """Checks that the path of the temporary folder is short enough for Unix sockets of Ray, torch and engines."""
    folder, most = tempfile.gettempdir(), longest_room(OF_LIBRARIES)
    if len(os.fsencode(folder)) > most:
        problem = too_long("TMPDIR", folder, OF_LIBRARIES)
        return Finding("temporary folder", FAIL, f"{problem}; {SHORTER.format(most)}")
    try:
        of_ray = ray_folder(new_run_id())
    except ConfigError as error:
        return Finding("temporary folder", FAIL, str(error))
    return Finding("temporary folder", OK, f"{folder}; a run's Ray uses {of_ray.parent}")


def check_loopback() -> Finding:
    """Checks that a server on loopback is reachable, because a run's servers listen there."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        with socket.create_connection(server.getsockname(), timeout=5):
            pass
    proxies = [n for n in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(n)]
    excluded = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if proxies and "127.0.0.1" not in excluded:
        return Finding("loopback", WARN, f"{proxies[0]} is set; run: export no_proxy=127.0.0.1,localhost")
    return Finding("loopback", OK, "ports can be opened and reached")


def check_sandbox() -> Finding:
    """Checks that code graders can confine model-written programs."""
    from slime.rewards.program_sandbox import WHAT_FOR, missing_here

    missing = missing_here()
    if not missing:
        held = "; ".join(f"{name} ({what})" for name, what in WHAT_FOR.items())
        return Finding("sandbox", OK, f"programs of --rm-type code are confined by {held}")
    gone = "; ".join(f"{name} ({WHAT_FOR[name]})" for name in missing)
    return Finding(
        "sandbox",
        WARN,
        f"no {gone}: --rm-type code is refused; allow user namespaces and Landlock, or use --allow-unconfined-code",
    )


def check_pairs(device: str) -> Finding:
    """Checks that prefill engines can pass the KV cache to decode engines."""
    from slime.serving.server import DEFAULT, missing_here

    missing = missing_here(DEFAULT, device)
    if missing is None:
        return Finding("pairs", OK, f"prefill and decode engines can communicate over {DEFAULT}")
    return Finding("pairs", WARN, f"prefill and decode engines (--prefill-num-servers) do not work: {missing}")


def check_import(name: str, code: str) -> Finding:
    """Runs `code` in a fresh interpreter. The last line of output becomes the finding's detail."""
    try:
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(
            name, FAIL, f"the import took more than {IMPORT_LIMIT_S} s; check for a slow disk or full memory"
        )
    lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines()
    last = lines[-1] if lines else f"exit {run.returncode} without output"
    if run.returncode:
        return Finding(name, FAIL, f"{last}; {how_to_install(name.split()[0])}")
    return Finding(name, OK, f"imports; {last}")


CHECKS = (check_memory, check_shared_memory, check_disk, check_temporary_folder, check_loopback, check_sandbox)
"""Checks of the machine, one finding each."""


def find_all(device: str, *, engines: bool, begun: Callable[[str], object] = lambda name: None) -> Iterator[Finding]:
    """Runs every check in order and yields its findings as they come. A check that raises counts as failed.

    `begun`: called with the name of each check before it runs.
    """
    chosen = "cuda" if device != "cpu" and host_facts()["num_gpus"] else "cpu"
    checks: dict[str, Callable[[], Sequence[Finding]]] = {
        "versions": check_versions,
        "device": lambda: [check_device(device)],
    }
    for check in CHECKS:
        checks[check.__name__.removeprefix("check_")] = lambda check=check: [check()]  # type: ignore[misc]
    if engines:
        programs = {"megatron import": MEGATRON_CODE, "kernels": KERNELS_CODE, "sglang import": SGLANG_CODE}
        for name, code in programs.items():
            program = code.format(device=chosen)
            checks[name] = lambda name=name, program=program: [check_import(name, program)]  # type: ignore[misc]
        checks["pairs"] = lambda: [check_pairs(chosen)]
    for name, run_check in checks.items():
        begun(name)
        yield from _guarded(name, run_check)


def _guarded(name: str, check: Callable[[], Sequence[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:
        return [Finding(name, FAIL, f"{type(error).__name__}: {error}")]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to check for")
    parser.add_argument(
        "--no-engines", action="store_true", help="skip the imports of SGLang and Megatron, which take 30 s"
    )
    parser.add_argument(
        "--template",
        metavar="DIR",
        help="check only this checkpoint's chat template: which agent actions leave earlier tokens as is",
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="check all hosts of this Ray cluster: versions, shared folders, clocks, GPUs, all-reduce bandwidth",
    )
    parser.add_argument(
        "--shared",
        metavar="DIR",
        action="append",
        help="with --ray-address: a folder that all hosts must see and write; may be repeated (default: this folder)",
    )


def run(options: argparse.Namespace) -> int:
    """Prints every finding; returns 1 if a check failed."""
    if options.template is not None:
        return report(options.template)
    if options.ray_address is not None:
        return check_hosts(options.ray_address, [Path(folder) for folder in options.shared or ["."]])
    if options.shared:
        raise ConfigError("--shared is for checks of a cluster; set --ray-address HOST:PORT, too")
    failed = []
    for finding in find_all(options.device, engines=not options.no_engines, begun=_show_begun):
        print(f"{finding.state:>4}  {finding.name:<16} {finding.detail}", flush=True)
        failed += [finding.name] if finding.state == FAIL else []
    print(f"these checks failed: {', '.join(failed)}" if failed else "this machine can run slime")
    return int(bool(failed))


def _show_begun(name: str) -> None:
    """Shows on a terminal which check is running, until its finding replaces the line."""
    if sys.stdout.isatty():
        print(f"  ..  {name:<16}", end="\r", flush=True)


COLUMNS = ("host", "address", "versions", "folders", "clock", "GPUs", "all-reduce")


def check_hosts(address: str, folders: Sequence[Path]) -> int:
    """Prints a table with a row per host and a sentence per problem; returns 1 if a run would fail.

    Raises `ConfigError` if there is no cluster or a folder does not exist.
    """
    from slime.cluster.launch_run import prepare_environment

    run_id = new_run_id()
    prepare_environment(run_id, ray_address=address)  # before Ray is imported
    from slime.cluster.cluster_check import check_cluster

    found = check_cluster(address, [folder.absolute() for folder in folders], run_id=run_id, begun=_show_begun)
    print(f"versions here: {', '.join(f'{name} {version}' for name, version in found.versions.items())}")
    rows = [COLUMNS, *(_row(found, host) for host in found.hosts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for backend, bandwidth in found.overall.items():
        print(f"all-reduce over all hosts ({backend}): {bandwidth / 1e9:.2f} GB/s")
    for note in found.notes:
        print(f"{'note':>4}  {note}")
    for problem in found.problems:
        print(f"{FAIL if problem.is_fatal else WARN:>4}  {problem.host}{': ' if problem.host else ''}{problem.text}")
    failed = sum(problem.is_fatal for problem in found.problems)
    print(f"this cluster has {failed} problem{'s'[: failed != 1]}" if failed else "this cluster can run slime")
    return int(bool(failed))


def _row(found: ClusterReport, host: HostReport) -> tuple[str, ...]:
    if (facts := host.facts) is None:
        return host.name, host.address, *["?"] * (len(COLUMNS) - 2)
    differ = [name for name, version in found.versions.items() if facts.versions.get(name, version) != version]
    free = ", ".join(f"{folder} {free / 2**30:.0f} GiB free" for folder, free in facts.free_bytes.items())
    skew = "?" if host.skew_s is None else f"{host.skew_s:+.3f} s"
    kinds = Counter(f"{gpu.name} (driver {gpu.driver})" for gpu in facts.gpus)
    gpus = ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) or "none"
    reduces = ", ".join(f"{kind} {value / 1e9:.2f} GB/s" for kind, value in host.bandwidths.items()) or "not measured"
    seen = "not shared; " if facts.unseen else "not writable; " if facts.unwritable else ""
    versions = f"other {', '.join(differ)}" if differ else "same"
    return facts.name, host.address, versions, seen + free, skew, gpus, reduces


def report(folder: str) -> int:
    """Prints which agent actions only append tokens in a chat template; returns 1 if not even plain turns do.

    Raises `ConfigError` for a folder without a tokenizer or a chat template.
    """
    from slime.data.checkpoint_template import CheckpointTemplate

    if not Path(folder).is_dir():
        raise ConfigError(f"--template {folder} is not a folder; pass the folder of a Hugging Face checkpoint")
    files = CheckpointTemplate.of(Path(folder))
    missing = "tokenizer" if not files.has_tokenizer else "chat template" if not files.has_template else ""
    if missing:
        raise ConfigError(f"--template {folder} has no {missing}; pass the folder of a chat model")
    from transformers import AutoTokenizer

    from slime.agent.parsers import FORMATS, format_of
    from slime.agent.template import ConversationTemplate
    from slime.agent.template_probe import probe, tools_problem
    from slime.data.chat import ChatRenderer
    from slime.rollout.factories import end_of_text

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokenizer in --template {folder} cannot be loaded: {error}") from error
    chat = ChatRenderer(tokenizer)
    ends = sorted(end_of_text(folder, tokenizer).token_ids)
    found = probe(chat, ends)
    for outcome in found.outcomes:
        mark = "ok" if outcome.works else "WARN"
        detail = f": {outcome.detail}" if outcome.detail else ""
        print(f"{mark:>4}  {outcome.feature:<30} {outcome.state.value}{detail}")
    name = format_of(chat.template)
    print(f"      {'format of tool calls':<30} {name or 'unknown'}")
    if name is not None:
        print(f"      {'ids of tool calls, such as':<30} {FORMATS.build(name, None).call_id('look_up', 0)}")
    print(f"      {'tokens that end a turn':<30} {', '.join(f'{chat.decode([i])!r} (id {i})' for i in ends)}")
    endings = ", ".join(f"{role} {token!r}" for role, token in found.endings)
    print(f"      {'end of an answer before':<30} {endings or 'nothing'}")
    try:
        found.require_plain_turns()
    except DataError as error:
        print(f"FAIL  {error}")
        return 1
    if problem := tools_problem(ConversationTemplate(chat, ends)):
        print(f"WARN  agents with tools are refused: {problem}")
    failing = ", ".join(found.failing)
    print(f"agents can use this model; these start a new branch or are refused: {failing or 'none'}")
    return 0
