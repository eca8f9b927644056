"""Checks this machine, the run folder and the data before any process starts.

These checks are separate from the validation of settings, because they depend on the machine.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from slime.core.cores import usable_cores
from slime.core.errors import ConfigError
from slime.core.processes import OF_LIBRARIES, SHORTER, longest_room, ray_folder, too_long
from slime.core.text import shorten
from slime.core.topology import PAIRED
from slime.core.user_files import paths_in_words
from slime.data.first_rows import data_problems
from slime.observability.start_record import OUTPUTS
from slime.rewards.pool import code_problems
from slime.serving.server import pair_problem
from slime.settings import Args
from slime.settings.flags import refuse
from slime.settings.groups.cluster import gpus_here, ray_address_in_words, split_address
from slime.settings.groups.training import has_checkpoint
from slime.settings.topology_yaml import settings_of_group, topology_of

EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
"""Empty HTTP/2 SETTINGS frame (RFC 9113, 6.5): length, type, flags, stream."""
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + EMPTY_SETTINGS
logger = logging.getLogger(__name__)
CONNECT_LIMIT_S, AGAIN_S = 5.0, 1.0
"""Timeout for a response from a Ray cluster's head, which usually takes milliseconds."""


@paths_in_words()
def preflight(args: Args) -> None:
    """Raises one `ConfigError` that lists all problems. Reads the first rows of the data. Takes at most a second, and
    up to `--cluster-wait-s` if the Ray cluster does not respond yet."""
    found = [*cluster_problems(args), *_of_machine(args), *_of_pairs(args), *_of_run_folder(args), *_of_folders(args)]
    found += _of_temporary_folder(args)
    refuse([*found, *data_problems(args), *code_problems(args)])


def _of_machine(args: Args) -> Iterator[str]:
    """Reports too few GPUs or, on CPU, fewer cores than training or engine ranks."""
    if args.ray_address is not None:  # the processes may run on other machines
        return
    num_train = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    num_engines = 0 if args.debug_train_only else args.rollout_num_gpus
    num_evaluating = topology_of(args).num_eval_gpus
    if args.device == "cuda":
        needed, here = max(num_train, num_engines) if args.colocate else num_train + num_engines, gpus_here()
        needed += num_evaluating
        if here is not None and here < needed:
            yield _too_few_gpus(args, needed, here)
        return
    cores = usable_cores()
    asked = {"--actor-num-gpus-per-node": num_train, "--rollout-num-gpus": num_engines, "--eval-fleet": num_evaluating}
    for flag, number in asked.items():
        if number > cores:
            yield (
                f"{flag} {number} requires {number} cores on CPU, one per process, but this machine has {cores} cores; "
                f"set {flag} to {cores} or less"
            )


def _of_pairs(args: Args) -> Iterator[str]:
    """Reports missing requirements of prefill-decode pairs on this host. On other hosts, the engine reports them."""
    groups = [group for model in topology_of(args).models for group in model.groups if group.worker in PAIRED]
    if args.ray_address is not None or not groups:
        return
    first = groups[0]  # all pairs of a run usually use the same transfer backend
    if problem := pair_problem(first.worker, settings_of_group(args, first), args.device, args.engine_start_timeout_s):
        yield problem


def _too_few_gpus(args: Args, needed: int, here: int) -> str:
    if not here:
        return "--device cuda needs a GPU, and this machine has none (no /dev/nvidia*); use --device cpu or no --device"
    share = "" if args.colocate else ", or share them with --colocate"
    return (
        f"the run needs {needed} GPUs, but this machine has {here} (/dev/nvidia*, CUDA_VISIBLE_DEVICES); lower "
        f"--actor-num-gpus-per-node or --rollout-num-gpus{' or --eval-fleet' * (args.eval_fleet is not None)}{share}"
    )


WRITTEN = tuple(sorted(OUTPUTS - {"run_dir"}))
"""Settings for folders and files, other than the run folder, that a run writes on the driver's host. A path that
contains `{rollout_id}` stands for one path per step."""
FILES = ("save_debug_rollout_data", "save_debug_train_data")


def _of_folders(args: Args) -> Iterator[str]:
    """Reports folders that are not writable and a --save folder that belongs to another run."""
    for name in WRITTEN:
        if getattr(args, name, None) is None:  # disabled, or belongs to a component that the run does not use
            continue
        path = Path(getattr(args, name)).absolute()
        tried = [path.parent] if name in FILES else [path]
        folder = next(one for one in (*tried, *path.parents) if "{" not in str(one))
        if (problem := _cannot_be_made(folder)) is not None:
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} {shorten(str(path), 300)} cannot be created: {problem}; choose a different folder"
    if args.save is not None and _holds_another_run(args):
        yield (
            f"--save {args.save} contains checkpoints of another run; choose a new folder, or continue that run with "
            f"--load {args.save}"
        )


def _holds_another_run(args: Args) -> bool:
    """Returns whether --save contains checkpoints of another run, which this run would overwrite and remove."""
    save = Path(args.save or "").resolve()
    continued = args.load is not None and save in (Path(args.load).resolve(), Path(args.load).resolve().parent)
    return not continued and has_checkpoint(str(save))


def _of_run_folder(args: Args) -> Iterator[str]:
    """Reports a run folder that is not writable or contains metrics of another run. Empty metrics are accepted."""
    if (problem := _cannot_be_made(Path(args.run_dir))) is not None:
        yield f"the run folder {shorten(args.run_dir, 300)} cannot be created: {problem}; choose a different --run-dir"
        return
    if not has_other_metrics(args):
        return
    told = f"the run folder {args.run_dir} contains metrics of an earlier run"
    if args.save is None or has_checkpoint(args.save):
        yield f"{told}; choose a new --run-dir, or continue that run by passing its --save folder to --load"
    else:
        yield (
            f"{told}, but --save {args.save} contains no checkpoint from which to continue; choose a new --run-dir, or "
            "delete the folder"
        )


def has_other_metrics(args: Args) -> bool:
    """Returns whether the run folder has metrics although the run does not resume (--load)."""
    metrics = Path(args.run_dir) / "metrics.jsonl"
    resumes = not args.origins.get("load", "default").startswith("default")  # even if an empty --load was dropped
    return not resumes and metrics.is_file() and metrics.stat().st_size > 0


def _cannot_be_made(folder: Path) -> str | None:
    """Returns why the folder cannot be created, or None."""
    try:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    except OSError as error:
        return str(error.strerror)
    if there == there.parent == folder.absolute():
        return "it is the root of the file system"
    if not there.is_dir():
        return f"{there} is a file"
    if not os.access(there, os.W_OK | os.X_OK) or not _takes_folders(there):
        return f"{there} is not writable"
    return None


def _takes_folders(folder: Path) -> bool:
    """Tests whether a folder can be created in `folder`. Permissions are not enough: in /proc, even root cannot."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".slime-", dir=folder))
    except OSError:
        return False
    return True


def _of_temporary_folder(args: Args) -> Iterator[str]:
    """Reports temporary folders that cannot be created or have paths too long for Ray's or torch's sockets."""
    folder, most = tempfile.gettempdir(), longest_room(OF_LIBRARIES)
    if len(os.fsencode(folder)) > most:
        yield f"{too_long('TMPDIR', folder, OF_LIBRARIES)}; {SHORTER.format(most)}"
    if args.ray_address is None:
        try:
            of_ray = ray_folder(args.run_id)
        except ConfigError as error:
            yield str(error)
            return
        if (problem := _cannot_be_made(of_ray)) is not None:
            yield f"the folder {of_ray} for Ray's files cannot be created: {problem}; choose a different RAY_TMPDIR"


def cluster_problems(args: Args) -> Iterator[str]:
    """Reports an address that is not a Ray cluster. Ray itself would retry for minutes and print C++ errors."""
    if args.ray_address in (None, "auto"):
        return
    host, port = split_address(args.ray_address)
    until_s = time.monotonic() + args.cluster_wait_s
    if (reason := why_unreachable(host, port)) is not None and args.cluster_wait_s:
        logger.warning("waiting %.0f s for the Ray cluster at %s: %s", args.cluster_wait_s, args.ray_address, reason)
    while reason is not None and time.monotonic() < until_s:
        time.sleep(AGAIN_S)
        reason = why_unreachable(host, port)
    if reason is not None:
        waited = f" within {args.cluster_wait_s:g} s" if args.cluster_wait_s else ""
        yield (
            f"no Ray cluster can be reached at {ray_address_in_words(args)}{waited} ({reason}); use HOST:PORT as "
            "printed by `ray start --head`, and start the driver on a host of the cluster"
        )


def why_unreachable(host: str, port: int) -> str | None:
    """Returns why there is no Ray cluster at an address, or None."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_LIMIT_S) as connection:
            return None if os.environ.get("RAY_USE_TLS") else _is_other_server(connection)
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else str(error.strerror or error)


def _is_other_server(connection: socket.socket) -> str | None:
    """Returns None for a gRPC server, such as a cluster's head, else a reason. gRPC first sends its HTTP/2 settings."""
    connection.sendall(HTTP2_GREETING)
    begun = b""
    while len(begun) < len(EMPTY_SETTINGS):
        found = connection.recv(len(EMPTY_SETTINGS) - len(begun))
        if not found:
            break
        begun += found
    return None if begun[3:4] == EMPTY_SETTINGS[3:4] else "another kind of server is listening there"
