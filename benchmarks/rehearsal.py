"""The controller of a large run, with simulated hosts, training ranks and engines: what a step costs, and what grows.

    python -m benchmarks.rehearsal --gpus 64,256,512,1024 --steps 20 --out benchmarks/results/rehearsal_cpu.json

Half of the GPUs train, with one rank each, the other half generate, with engines of two. A host has eight. In each step
an engine dies; a host dies in a third of the way and is back after two thirds. Everything on the driver's host is real:
`train.py`, Ray, the rollout process with Data Buffer, ledger, clients and graders, the fleet's supervisor, the router,
metrics and logs. `benchmarks.rehearsal_world` simulates what is beyond, and says how.

Each number of GPUs runs in a process of its own. `driver_cpu_s` is the processor time of the driver's whole process,
with Ray's threads. `parts` are those of the driver's thread: seconds of processor time and of waiting, without those of
the parts inside. Compare processor times, because other work on the machine makes everything wait longer.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PER_HOST, PER_ENGINE, NUM_SAMPLES = 8, 2, 4
ROOT = Path(__file__).parents[1]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
RECOVERIES = ("engine noticed", "engine serves again", "host noticed", "host serves again")
DIES_AFTER_S = 0.3
"""When an engine dies, after the beginning of a generation."""


# --- Measuring


@dataclass(slots=True)
class Part:
    calls: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0


class Meter:
    """Adds up the time of functions of this thread by part, without that of the measured functions they call."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, Part] = defaultdict(Part)
        self._thread = threading.get_ident()
        self._inside: list[list[float]] = []

    def measure(self, owner: Any, name: str, part: str) -> None:
        """Measures a function or method from now on."""
        setattr(owner, name, self.measured(getattr(owner, name), part))

    def measured(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*given: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*given, **named)
            self._inside.append([0.0, 0.0])
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
                inner_cpu, inner_wall = self._inside.pop()
                if self._inside:
                    self._inside[-1][0] += cpu
                    self._inside[-1][1] += wall
                one = self.parts[part]
                one.calls, one.cpu_s, one.wall_s = (
                    one.calls + 1,
                    one.cpu_s + cpu - inner_cpu,
                    one.wall_s + wall - inner_wall,
                )

        return timed

    def take(self) -> dict[str, Part]:
        """Returns the parts since the last call."""
        found, self.parts = dict(self.parts), defaultdict(Part)
        return found


def measure_driver(meter: Meter) -> None:
    """Measures the parts of the driver."""
    from slime.cluster import hosts, start_actors, waiting
    from slime.cluster.engine_actors import RayEngines
    from slime.cluster.engine_tracker import Engines
    from slime.cluster.hang_doctor import HangDoctor
    from slime.cluster.hosts import GuardedHosts
    from slime.cluster.training_run import EngineMetrics, Run
    from slime.cluster.weight_sync_sequence import WeightSyncSequence
    from slime.fleet.supervisor import Supervisor
    from slime.observability.tracker import Tracker

    for owner, name, part in (
        (hosts, "_plan", "start: placement plan"),
        (hosts, "_on_all", "start: questions to hosts"),
        (start_actors, "_create_trainers", "start: create ranks"),
        (start_actors, "_build_trainers", "start: build ranks"),
        (RayEngines, "__init__", "start: create engines"),
        (start_actors.StartProgress, "tell", "start: progress"),
        (Run, "generate", "generate"),
        (Run, "train", "train: hand out the batch"),
        (Run, "sync_weights", "weight sync"),
        (Run, "end_step", "end of step"),
        (Engines, "infos", "weight sync"),
        (WeightSyncSequence, "join", "join"),
        (RayEngines, "troubles", "health of engines"),
        (Supervisor, "tend", "supervisor"),
        (GuardedHosts, "tend", "health of hosts"),
        (Engines, "_follow_orders", "orders of slime fleet"),
        (Engines, "_look_for_stalls", "stalls"),
        (Engines, "_admit", "admission"),
        (Engines, "tended", "health, rest"),
        (EngineMetrics, "look", "metrics of engines"),
        (EngineMetrics, "_changed", "metrics of engines"),
        (HangDoctor, "tend", "hang doctor"),
        (Tracker, "log", "metrics of steps"),
    ):
        meter.measure(owner, name, part)
    for module in [one for name, one in sys.modules.items() if name.startswith("slime.cluster")]:
        if getattr(module, "wait_for", None) is waiting.wait_for and module is not waiting:
            vars(module)["wait_for"] = meter.measured(waiting.wait_for, "waits for answers")


def cpu_of(pid: int) -> float:
    """Returns the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


# --- The cluster


@dataclass(slots=True)
class Cluster:
    """What Ray would say about the simulated hosts."""

    num_hosts: int
    own_node: str
    first_rank: Any
    ranks: Any
    engines: Any
    """The `World` actors."""
    ids: dict[str, str] = field(default_factory=dict)
    """Address -> node id of the present hosts."""

    def __post_init__(self) -> None:
        self.ids = {self.address(h): self.own_node if h == 0 else f"{h:056x}" for h in range(self.num_hosts)}

    def address(self, number: int) -> str:
        return f"127.1.{number // 250}.{number % 250 + 1}"

    def host_of(self, node_id: str) -> str:
        return next(address for address, known in self.ids.items() if known == node_id)

    def hosts(self, args: Any) -> list[Any]:
        """Stands in for `nodes_of_cluster`."""
        from slime.cluster.placement import Host

        return [Host(f"h{h}", a, PER_HOST, 64, n) for h, (a, n) in enumerate(self.ids.items())]

    def living(self) -> dict[str, list[str]]:
        """Stands in for `RayNodes.living`."""
        return {address: [node_id] for address, node_id in self.ids.items()}

    def lose(self, address: str) -> None:
        del self.ids[address]
        for world in (self.ranks, self.engines):
            world.lose_host.remote(address)

    def bring_back(self, address: str) -> None:
        self.ids[address] = f"{self.num_hosts + len(self.ids):056x}"

    def install(self) -> None:
        """Puts the simulated actors and hosts where the driver looks for Ray's."""
        import ray

        from benchmarks.rehearsal_world import Handle, Simulated
        from slime.cluster import engine_actors, host_actor, hosts, start_actors

        kill = ray.kill

        def kill_either(actor: Any, **named: Any) -> None:
            actor._world.kill.remote(actor.key) if isinstance(actor, Handle) else kill(actor, **named)

        slots: list[Any] = []

        def reserve(plan: Any, **_: Any) -> Any:
            slots[:] = [plan.hosts[h].address for h in plan.slot_hosts]
            return SimpleNamespace(options=lambda slot, share: {"slot": slot}, devices=None)

        def by_slot(options: dict[str, Any]) -> tuple[str, bool]:
            return slots[options["slot"]], options["slot"] % PER_HOST == 0

        def by_node(options: dict[str, Any]) -> tuple[str, bool]:
            return self.host_of(options["scheduling_strategy"].node_id), True

        for owner, name, double in (
            (ray, "kill", kill_either),
            (hosts, "nodes_of_cluster", self.hosts),
            (host_actor.RayNodes, "living", self.living),
            (start_actors, "reserve", reserve),
            (start_actors, "TrainActor", Simulated("rank", self.ranks, by_slot, first=self.first_rank)),
            (engine_actors, "EngineActor", Simulated("engine", self.engines, by_slot)),
            (host_actor, "HostActor", Simulated("host", self.ranks, by_node)),
        ):
            setattr(owner, name, double)


# --- The run


def flags_of(num_gpus: int, num_steps: int, folder: Path, *, router: bool) -> list[str]:
    half = num_gpus // 2
    sizes = {
        "hf-checkpoint": folder / "model",
        "prompt-data": folder / "prompts.jsonl",
        "label-key": "label",
        "no-apply-chat-template": "",
        "rm-type": "random",
        "reward-num-workers": 1,
        "ray-address": "auto",
        "run-dir": folder / f"run-{num_gpus}",
        "device": "cpu",
        "num-rollout": num_steps,
        "rollout-batch-size": max(num_gpus // 8, 2),
        "n-samples-per-prompt": NUM_SAMPLES,
        "rollout-max-response-len": 32,
        "actor-num-nodes": half // PER_HOST,
        "actor-num-gpus-per-node": PER_HOST,
        "rollout-num-gpus": half,
        "rollout-num-gpus-per-engine": PER_ENGINE,
        "rollout-num-workers": 0,
        "update-weight-transport": "distributed",
        "metrics-port": 0,
        **({"router-log-level": "warn"} if router else {}),
    }
    return [word for name, value in sizes.items() for word in (f"--{name}", str(value)) if word]


class Rehearsal:
    """One run: its faults, and the records of its steps."""

    def __init__(self, num_steps: int, cluster: Cluster, meter: Meter) -> None:
        self._num_steps, self._cluster, self._meter = num_steps, cluster, meter
        self._began = self._now()
        self.start: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        self._lost_host = ""
        self._rollout_pid = 0
        self._struck: dict[int, float] = {}
        """Engine -> when it died, or when its host came back."""
        self.recovery: defaultdict[str, list[float]] = defaultdict(list)

    def install(self) -> None:
        """Makes the loop of the run call this object."""
        from slime.cluster.training_run import Run

        begin, end = Run.start_generation, Run.end_step

        def begins(run: Run, rollout_id: int) -> Any:
            if not self.start:
                self.start = self._record(run)
                run._actors.engines.members.follow(self._follow)
            self.strike(run, rollout_id)
            return begin(run, rollout_id)

        def ends(run: Run, rollout_id: int) -> None:
            end(run, rollout_id)
            self.steps.append(self._record(run))

        double: Any = Run
        double.start_generation, double.end_step = begins, ends

    def strike(self, run: Any, step: int) -> None:
        """An engine dies in this step, and perhaps a host dies or is back."""
        from slime.fleet.supervisor import State

        ready = run._actors.engines.members.in_states(State.READY)
        if step == self._num_steps // 3 and len({engine.host for engine in ready}) > 1:
            self._lost_host = ready[-1].host
            self._cluster.lose(self._lost_host)
            self._struck |= dict.fromkeys(self._engines_of(run, self._lost_host), time.perf_counter())
        if step == 2 * self._num_steps // 3 and self._lost_host:
            self._cluster.bring_back(self._lost_host)
            self._struck |= dict.fromkeys(self._engines_of(run, self._lost_host), time.perf_counter())
        victims = [engine for engine in ready if engine.host != self._lost_host]
        victim = victims[step * 7 % len(victims)]
        self._struck[victim.index] = time.perf_counter() + DIES_AFTER_S
        timer = threading.Timer(DIES_AFTER_S, lambda: self._cluster.engines.lose_engine.remote(victim.url))
        timer.start()

    def _engines_of(self, run: Any, host: str) -> list[int]:
        return [engine.index for engine in run._actors.engines.members.engines if engine.host == host]

    def _follow(self, before: Any, after: Any) -> None:
        """Notes how long it takes to notice what died, and until it serves again."""
        struck = self._struck.get(after.index)
        if struck is None or after.state.value not in ("dead", "ready"):
            return
        what = "host" if after.host == self._lost_host else "engine"
        event = "noticed" if after.state.value == "dead" else "serves again"
        self.recovery[f"{what} {event}"].append(round(time.perf_counter() - struck, 3))
        if event != "noticed" or what == "host":
            del self._struck[after.index]

    def _now(self) -> dict[str, float]:
        return {"wall_s": time.perf_counter(), "driver_cpu_s": time.process_time()}

    def _record(self, run: Any) -> dict[str, Any]:
        """Returns what happened since the last record."""
        import ray

        from benchmarks.rehearsal_world import Handle

        if not self._rollout_pid:
            self._rollout_pid = ray.get(run._actors.rollout.__ray_call__.remote(lambda _: os.getpid()))
            self._began["rollout_cpu_s"] = 0.0
        now = {**self._now(), "rollout_cpu_s": cpu_of(self._rollout_pid)}
        passed = {name: round(value - self._began[name], 4) for name, value in now.items()}
        parts = {
            name: {"calls": one.calls, "cpu_s": round(one.cpu_s, 5), "wall_s": round(one.wall_s, 4)}
            for name, one in sorted(self._meter.take().items())
        }
        calls = dict(Handle.calls)
        Handle.calls.clear()
        asked = ray.get(self._cluster.engines.take_asked.remote())
        ready = sum(engine.state.value == "ready" for engine in run._actors.engines.members.engines)
        self._began = {**self._now(), "rollout_cpu_s": cpu_of(self._rollout_pid)}
        return {**passed, "ready_engines": ready, "parts": parts, "calls": calls, "asked": asked}


def rehearse(num_gpus: int, num_steps: int, folder: Path, *, router: bool) -> dict[str, Any]:
    """Runs one rehearsal in this process, which must not have used Ray before."""
    from slime.cluster.launch_run import LOCAL_RAY

    os.environ.update({**LOCAL_RAY, "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    import train
    from slime.core.processes import ray_folder
    from slime.settings import parse_args

    args = parse_args(flags_of(num_gpus, num_steps, folder, router=router))
    meter = Meter()
    rehearsals: list[Rehearsal] = []
    _instead_of_joining(lambda: rehearsals.append(_prepared(num_gpus, num_steps, meter)))
    measure_driver(meter)
    try:
        train.train.__wrapped__(args)  # type: ignore[attr-defined]
    finally:
        shutil.rmtree(ray_folder(args.run_id), ignore_errors=True)
    (one,) = rehearsals
    rows = [json.loads(line) for line in (folder / f"run-{num_gpus}" / "metrics.jsonl").read_text().splitlines()]
    syncs = [row for row in rows if "perf/update_weights_time" in row]
    for step, row in zip(one.steps, syncs, strict=True):
        step["sync_cpu_s"], step["sync_s"] = row["perf/sync_cpu"], row["perf/update_weights_time"]
    return {
        "gpus": num_gpus,
        "hosts": num_gpus // PER_HOST,
        "ranks": num_gpus // 2,
        "engines": num_gpus // 2 // PER_ENGINE,
        "router": router,
        "recovery_s": {name: round(statistics.median(times), 2) for name, times in sorted(one.recovery.items())},
        "start": one.start,
        "step": summary(one.steps),
        "steps": [{name: value for name, value in step.items() if name != "parts"} for step in one.steps],
    }


def _prepared(num_gpus: int, num_steps: int, meter: Meter) -> Rehearsal:
    import ray

    from benchmarks.rehearsal_world import World

    make: Any = World
    own = ray.get_runtime_context().get_node_id()
    cluster = Cluster(num_gpus // PER_HOST, own, make.remote(), make.remote(), make.remote())
    cluster.install()
    rehearsal = Rehearsal(num_steps, cluster, meter)
    rehearsal.install()
    return rehearsal


def _instead_of_joining(prepare: Callable[[], Any]) -> None:
    """Makes the driver start a Ray of its own where it would join one over several hosts. Then calls `prepare`."""
    from slime.cluster import ray_session

    def start(session: ray_session.JoinedRay) -> None:
        ray_session._start_local(session.run_id, 4, 0, ray_session.LEAST_STORE_BYTES)
        prepare()

    double: Any = ray_session.JoinedRay
    double._start = start


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median step, by measure and by part."""

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 5)

    measures = ("wall_s", "driver_cpu_s", "rollout_cpu_s", "sync_cpu_s", "sync_s")
    names = sorted({name for step in steps for name in step["parts"]})
    nothing = {"calls": 0, "cpu_s": 0.0, "wall_s": 0.0}
    parts = {
        name: {key: median([step["parts"].get(name, nothing)[key] for step in steps]) for key in nothing}
        for name in names
    }
    return {
        **{name: median([step[name] for step in steps]) for name in measures},
        "calls": median([sum(step["calls"].values()) for step in steps]),
        "requests_of_sync": median(
            [sum(n for route, n in step["asked"].items() if route != "/generate") for step in steps]
        ),
        "parts": parts,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Returns the results as a Markdown table, one column per number of GPUs."""
    names = sorted({name for one in results for name in one["step"]["parts"]})
    rows = [
        ("start, wall s", [one["start"]["wall_s"] for one in results]),
        ("start, driver CPU s", [one["start"]["driver_cpu_s"] for one in results]),
        *((f"step, {key}", [one["step"][key] for one in results]) for key in results[0]["step"] if key != "parts"),
        *((f"{name}, s", [one["recovery_s"].get(name, 0.0) for one in results]) for name in RECOVERIES),
        *(
            (f"{name}, CPU ms", [1e3 * one["step"]["parts"].get(name, {"cpu_s": 0.0})["cpu_s"] for one in results])
            for name in names
        ),
    ]
    head = ["", *(f"{one['gpus']} GPUs" for one in results)]
    lines = [head, ["---"] * len(head), *([name, *(f"{value:.3g}" for value in values)] for name, values in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="64,256,512,1024")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-router", action="store_true", help="run without a router")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        result = rehearse(options.only, options.steps, options.folder, router=not options.no_router)
        options.out.write_text(json.dumps(result))
        return
    from tests.support.rollout import write_checkpoint_stub, write_prompts

    command = " ".join(["python", "-m", "benchmarks.rehearsal", *sys.argv[1:]])
    made = {"command": command, "cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        folder = Path(name)
        write_checkpoint_stub(folder / "model")
        write_prompts(folder / "prompts.jsonl", 256)
        for num_gpus in map(int, options.gpus.split(",")):
            result = folder / f"{num_gpus}.json"
            words = ["--only", str(num_gpus), "--steps", str(options.steps), "--out", str(result), "--folder", name]
            words += ["--no-router"] * options.no_router
            log = folder / f"{num_gpus}.log"
            with log.open("w") as output:
                told = {"stdout": output, "stderr": subprocess.STDOUT, "cwd": ROOT}
                done = subprocess.run([sys.executable, "-m", "benchmarks.rehearsal", *words], check=False, **told)
            if done.returncode:
                sys.exit(f"the rehearsal with {num_gpus} GPUs failed:\n{log.read_text()[-6000:]}")
            results.append(json.loads(result.read_text()))
            if options.out:
                options.out.write_text(json.dumps({**made, "results": results}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
