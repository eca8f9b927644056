"""A Slurm cluster over hosts that are namespaces of this machine (`tests.support.hosts`): slurmctld, slurmd and munge.

The programs are those of Debian's packages slurmctld, slurmd, slurm-client and munge, installed, or unpacked below the
folder that the variable SLURM_ROOT names. That must not be in /tmp, because every host has a /tmp of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.e2e import ROOT, environment
from tests.support.hosts import FakeHost, network_of_hosts, why_no_hosts

PREFIX = Path(os.environ.get("SLURM_ROOT", "/"))
LIBRARIES = PREFIX / "usr/lib/x86_64-linux-gnu"
PROGRAMS = ("slurmctld-wlm", "slurmd-wlm", "slurmstepd-wlm", "munged")
START_LIMIT_S = 60.0
CONFIG = """
ClusterName=tests
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/tmp/munge.socket,cred_expire=20
CredType=cred/munge
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MailProg=/bin/true
MpiDefault=none
PluginDir={libraries}/slurm-wlm
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""A job that is requeued starts again after cred_expire seconds (120 by default)."""


def why_no_slurm() -> str:
    """Why this machine can run no Slurm; empty if it can."""
    missing = [program for program in PROGRAMS if not (PREFIX / "usr/sbin" / program).is_file()]
    if missing:
        return f"{', '.join(missing)} is not installed (Debian: slurmctld, slurmd, slurm-client, munge)"
    if PREFIX.resolve().is_relative_to("/tmp"):
        return f"SLURM_ROOT {PREFIX} is in /tmp, of which every host has its own; unpack the packages elsewhere"
    return why_no_hosts()


@dataclass
class Slurm:
    hosts: list[FakeHost]
    folder: Path

    def run(self, *words: str) -> str:
        """Runs a command of Slurm on the first host."""
        return self.hosts[0].run([str(PREFIX / "usr/bin" / words[0]), *words[1:]])

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says about a job."""
        said = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in said if "=" in word)

    @property
    def logs(self) -> str:
        """The end of each log of Slurm, for the message of a failed assertion."""
        return "\n".join(f"{file.name}:\n{file.read_text()[-2000:]}" for file in self.folder.glob("slurm*.log"))


@contextmanager
def slurm_cluster(shared: Path, count: int) -> Iterator[Slurm]:
    """Hosts with two CPUs each. `shared`: the folder that all of them see."""
    folder = shared / "slurm"
    folder.mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    with network_of_hosts(shared, count) as hosts, ExitStack() as stack:
        nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs=2 State=UNKNOWN" for host in hosts]
        first = hosts[0]
        text = CONFIG.format(
            first=first.name, address=first.address, folder=folder, libraries=LIBRARIES, nodes="\n".join(nodes)
        )
        (folder / "slurm.conf").write_text(text)
        path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), str(PREFIX / "usr/bin")])
        (folder / "slime").write_text(f'#!/bin/bash\nexec {sys.executable} -m slime "$@"\n')
        (folder / "slime").chmod(0o755)
        for host in hosts:
            host.environment = environment() | {
                "SLURM_CONF": str(folder / "slurm.conf"),
                "LD_LIBRARY_PATH": os.pathsep.join([str(LIBRARIES / "slurm-wlm"), str(LIBRARIES)]),
                "PATH": os.pathsep.join([path, os.environ["PATH"]]),
                "PYTHONPATH": str(ROOT),
            }
            _start(stack, host, "munged", "--foreground", "--force", f"--key-file={key}", *MUNGE)
        time.sleep(1.0)
        _start(stack, first, "slurmctld-wlm", "-D")
        for host in hosts:
            _start(stack, host, "slurmd-wlm", "-D", "-N", host.name, "-d", str(PREFIX / "usr/sbin/slurmstepd-wlm"))
        cluster, until_s = Slurm(hosts, folder), time.monotonic() + START_LIMIT_S
        while "idle" not in (said := _asked(cluster)) or said.count("idle") < count:
            assert time.monotonic() < until_s, f"{said}\n{cluster.logs}"
            time.sleep(0.5)
        yield cluster


MUNGE = ("--socket=/tmp/munge.socket", *(f"--{name}-file=/tmp/munge.{name}" for name in ("pid", "log", "seed")))


def _asked(cluster: Slurm) -> str:
    try:
        return cluster.run("sinfo", "-h", "-N", "-o", "%T")
    except AssertionError as error:  # the controller does not answer yet
        return str(error)


def _start(stack: ExitStack, host: FakeHost, program: str, *words: str) -> None:
    """Starts a daemon, which ends with its host."""
    env = {**os.environ, **host.environment}
    command = host.command([str(PREFIX / "usr/sbin" / program), *words])
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()

    stack.callback(end)
