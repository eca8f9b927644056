"""Mutations of the wiring of cluster, fleet, serving and weights: who is told what, when, by which key and version."""

from __future__ import annotations

from tests.mutation.record import Mutation

ENGINE_WIRING: dict[str, Mutation] = {
    "an engine that comes back gets a group of its own": Mutation(
        "sequence",
        "cluster/weight_sync_sequence.py",
        "self._joins_alone = not sends_to_all",
        "self._joins_alone = True",
    ),
    "four failures of an engine": Mutation(
        "supervisor", "fleet/supervisor.py", "if failures < MAX_FAILURES or", "if failures <= MAX_FAILURES or"
    ),
    "a sick engine is started for ever": Mutation(
        "supervisor", "fleet/supervisor.py", "losses >= MAX_LOSSES and", "losses > 99 * MAX_LOSSES and"
    ),
    "starts are time without losses": Mutation(
        "supervisor",
        "fleet/supervisor.py",
        "+ now - self._since.pop(index, now)",
        "+ now - self._since.setdefault(index, now)",
    ),
    "every pause before a start is the first": Mutation(
        "supervisor", "fleet/supervisor.py", "backoff_s(max(failures, losses, 1), PAUSE_S, longest_s)", "PAUSE_S"
    ),
    "a lost engine is not dismissed": Mutation(
        "supervisor",
        "fleet/supervisor.py",
        "(engine)\n        self._membership.change(engine.index, State.DEAD, reason=reason)",
        ", self._membership.change(engine.index, State.DEAD, reason=reason)",
    ),
    "a drained engine is started again": Mutation(
        "supervisor",
        "fleet/supervisor.py",
        "e.index not in self._drained and self._clock()",
        "self._clock()",
    ),
    "weights of the process before": Mutation(
        "supervisor",
        "fleet/supervisor.py",
        "if now.incarnation == engine.incarnation and now.state is State.SYNCING:\n"
        "                self._membership.change(engine.index, State.READY",
        "if now.state is State.SYNCING:\n                self._membership.change(engine.index, State.READY",
    ),
    "an engine of somebody else is asked again soon": Mutation(
        "supervisor",
        "fleet/supervisor.py",
        "longest_s = longest_s if engine.external else LONGEST_PAUSE_S",
        "longest_s = LONGEST_PAUSE_S",
    ),
    "half of a pair answers": Mutation(
        "supervisor", "fleet/supervisor.py", "return self.model, self.worker", "return self.model, Worker.REGULAR"
    ),
    "requests before weights are verified": Mutation(
        "engines",
        "cluster/engine_tracker.py",
        "for engine in self.members.in_states(State.READY):\n            if engine.url and engine.url not in",
        "for engine in self.members.in_states(*ASKED):\n            if engine.url and engine.url not in",
    ),
    "senders without the key": Mutation(
        "wiring",
        "cluster/engine_tracker.py",
        "e.slots, self._control_key, e.incarnation",
        "e.slots, None, e.incarnation",
    ),
    "a lost engine is known for good": Mutation(
        "engines", "cluster/engine_tracker.py", "            self._admitted.remove(engine.url)\n", ""
    ),
    "a lost engine keeps its requests": Mutation(
        "engines",
        "cluster/engine_tracker.py",
        "            self._rollout.dismiss.remote(engine.model, [engine.url], died)\n",
        "",
    ),
    "an engine of a pair does all": Mutation(
        "wiring",
        "cluster/engine_tracker.py",
        "self._rollout.admit.remote(model, urls, worker)",
        "self._rollout.admit.remote(model, urls)",
    ),
    "milliseconds of silence": Mutation(
        "engines",
        "cluster/engine_tracker.py",
        "return float(self._args.rollout_health_check_timeout + self._args.rollout_health_check_interval)",
        "return float(self._args.rollout_health_check_timeout) / 1000",
    ),
    "an engine is as silent as before its weights": Mutation(
        "engines",
        "cluster/engine_tracker.py",
        "self._rollout.stalled.remote(now - self._served_at)",
        "self._rollout.stalled.remote(now)",
    ),
    "half of a pair of the policy answers": Mutation(
        "engines",
        "cluster/engine_tracker.py",
        "if engine.role == POLICY} == kinds",
        "if engine.role == POLICY} <= kinds",
    ),
    "frozen engines that lend their memory serve": Mutation(
        "engines", "cluster/engine_tracker.py", "        for engine in aside:\n            self._dismiss(engine)\n", ""
    ),
    "an engine that refuses weights is asked soon": Mutation(
        "engines", "cluster/engine_tracker.py", ", longest_s=LONGEST_REFUSAL_S)", ")"
    ),
    "weights for frozen engines": Mutation(
        "engines",
        "cluster/engine_tracker.py",
        "            return self._of_role(POLICY)",
        "            return self.members.in_states(*ASKED)",
    ),
    "engines without the key": Mutation("wiring", "cluster/engine_actors.py", "            keys=self._keys,\n", ""),
    "engines sample alike": Mutation(
        "wiring",
        "cluster/engine_actors.py",
        "            index=index,\n            num_threads",
        "            index=0,\n            num_threads",
    ),
    "a host of an engine listens at another's address": Mutation(
        "wiring",
        "cluster/engine_actors.py",
        "host = self._plan.address_of(part[0])",
        "host = self._plan.address_of(placed.slots[0])",
    ),
    "the old server of an engine lives on": Mutation(
        "wiring", "cluster/engine_actors.py", "        for actor in ending.actors:\n            ray.kill(actor)\n", ""
    ),
    "the gate of the first host alone": Mutation(
        "wiring",
        "cluster/engine_actors.py",
        "            for actor in self._crews[index]:\n                actor.open_gate.remote()",
        "            self._crews[index][0].open_gate.remote()",
    ),
    "an engine starts unguarded": Mutation(
        "wiring",
        "cluster/engine_actors.py",
        "        if not all(self._hosts.is_guarded(host) for host in self._hosts_of(index)):\n"
        "            return False\n",
        "",
    ),
    "settings of a group dropped": Mutation(
        "wiring",
        "cluster/engine_actors.py",
        "overrides = dict(wanted.group.overrides)",
        "overrides = dict[str, object]()",
    ),
    "every engine lends its memory": Mutation(
        "wiring", "cluster/engine_actors.py", "shares=placed.colocated,", "shares=True,"
    ),
    "engines lend what they keep": Mutation(
        "wiring",
        "cluster/engine_actors.py",
        "lends=placed.colocated and self._args.offload_rollout",
        "lends=placed.colocated",
    ),
    "weights that nobody sends are lent": Mutation(
        "wiring",
        "cluster/engine_actors.py",
        '            overrides.setdefault("enable_weights_cpu_backup", True)\n',
        "            pass\n",
    ),
    "the first host of an engine alone stops": Mutation(
        "wiring", "cluster/engine_actors.py", "for actor in self._crews[index]]", "for actor in self._crews[index][:1]]"
    ),
    "any host of an engine is enough": Mutation(
        "wiring", "cluster/engine_actors.py", "return all(self._hosts.has(host)", "return any(self._hosts.has(host)"
    ),
    "memory that nobody lends": Mutation(
        "wiring", "cluster/engine_actors.py", "        if self.may_take_memory():\n", "        if True:\n"
    ),
    "GPUs of other slots": Mutation(
        "wiring",
        "cluster/engine_actors.py",
        "self._slots.devices[slot] for slot in slots",
        "self._slots.devices[i] for i, _ in enumerate(slots)",
    ),
    "an engine's owner without its key": Mutation(
        "wiring",
        "cluster/engine_actors.py",
        "args.weight_sync_timeout_s, spec.keys.control)",
        "args.weight_sync_timeout_s)",
    ),
    "health is asked at its limit": Mutation(
        "wiring",
        "cluster/engine_actors.py",
        "            interval_s=args.rollout_health_check_interval,\n"
        "            timeout_s=args.rollout_health_check_timeout,\n",
        "            interval_s=args.rollout_health_check_timeout,\n"
        "            timeout_s=args.rollout_health_check_interval,\n",
    ),
    "a weights agent without the key": Mutation(
        "wiring",
        "cluster/engine_actors.py",
        "AgentProcess(settings, url, spec.keys.control,",
        "AgentProcess(settings, url, None,",
    ),
    "all memory at once": Mutation(
        "wiring", "cluster/engine_actors.py", "self._control.resume_memory(tags)", "self._control.resume_memory()"
    ),
    "memory of an engine that is busy": Mutation(
        "wiring",
        "cluster/engine_actors.py",
        "        self._control.flush_cache()\n        self._control.release_memory",
        "        self._control.release_memory",
    ),
    "slots are kept": Mutation("wiring", "cluster/host_actor.py", "    remove_placement_group(group)\n", ""),
    "bundles by the number of the slot": Mutation(
        "wiring",
        "cluster/host_actor.py",
        "placement_group_bundle_index=self.bundles[slot] if",
        "placement_group_bundle_index=slot if",
    ),
    "variables of training ranks dropped": Mutation(
        "wiring", "cluster/train_actor.py", "        os.environ.update(args.train_env_vars)\n", ""
    ),
    "ranks wait for a lost engine": Mutation(
        "wiring",
        "cluster/train_actor.py",
        "            self._weight_sync.give_up(url, incarnation)\n",
        "            pass\n",
    ),
    "a version is trained twice": Mutation(
        "wiring", "cluster/train_actor.py", "        self._backend.weight_version += 1\n", ""
    ),
    "threads of the first rank": Mutation(
        "wiring", "cluster/start_actors.py", "plan.train_threads[rank]", "plan.train_threads[0]"
    ),
    "ranks listen at the first one's address": Mutation(
        "wiring",
        "cluster/start_actors.py",
        "str(folder.logs), address_of(slot)",
        "str(folder.logs), address_of(plan.train_slots[0])",
    ),
    "the router's key is not the run's": Mutation(
        "wiring",
        "cluster/start_actors.py",
        'args.sglang.get("api_key") or args.router.get("api_key"), args',
        'args.sglang.get("api_key"), args',
    ),
    "engines take what nobody has lent yet": Mutation(
        "wiring", "cluster/start_actors.py", "[engine.open_gate.remote(*lent)", "[engine.open_gate.remote()"
    ),
    "whoever may generate may replace weights": Mutation(
        "wiring", "cluster/start_actors.py", "admin or secrets.token_hex(32)", "admin"
    ),
    "a router without the key of its engines": Mutation(
        "wiring",
        "cluster/rollout_actor.py",
        "            worker_api_key=engine_key,\n            pairs",
        "            worker_api_key=None,\n            pairs",
    ),
    "the router's port is any": Mutation(
        "wiring", "cluster/rollout_actor.py", "port=args.router_port if alone else None", "port=None"
    ),
    "a router for pairs knows none": Mutation(
        "wiring", "cluster/rollout_actor.py", "            pairs=model.in_pairs,\n", ""
    ),
    "settings of the router dropped": Mutation(
        "wiring",
        "cluster/rollout_actor.py",
        'extra_args={**args.router, "api_key": key}',
        'extra_args={"api_key": key}',
    ),
    "a router keeps the dead": Mutation(
        "wiring", "cluster/rollout_actor.py", "            self._routers.dismiss(model, urls)\n", "            pass\n"
    ),
    "a router takes halves of pairs for whole": Mutation(
        "wiring",
        "cluster/rollout_actor.py",
        "self._routers.admit(model, urls, worker)",
        "self._routers.admit(model, urls)",
    ),
    "the version before": Mutation(
        "wiring",
        "cluster/rank_weight_sync.py",
        "version=self._backend.weight_version,",
        "version=self._backend.weight_version - 1,",
    ),
    "requests end at every weight sync": Mutation(
        "wiring", "cluster/rank_weight_sync.py", "            pause_mode=pause_mode,\n", ""
    ),
    "a new engine is as lost as the old one": Mutation(
        "wiring",
        "cluster/rank_weight_sync.py",
        "lambda: (info.url, info.incarnation) in self._given_up",
        "lambda: info.url in {url for url, _ in self._given_up}",
    ),
    "every rank has the first one's GPU": Mutation(
        "wiring",
        "cluster/rank_weight_sync.py",
        "gpu_id=gpu_of_slot.get(slots[rank]) if",
        "gpu_id=gpu_of_slot.get(slots[0]) if",
    ),
    "every rank tells of the first one's slot": Mutation(
        "wiring", "cluster/rank_weight_sync.py", "self._gpus(slots[rank])", "self._gpus(slots[0])"
    ),
    "no rank hands the function after a write on": Mutation(
        "wiring", "cluster/rank_weight_sync.py", "            post_write=_post_write(args),\n", ""
    ),
    "each rank sends again as it thinks best": Mutation(
        "wiring",
        "cluster/rank_weight_sync.py",
        "if not self._peers.broadcast(fleet.channel.heals):",
        "if not fleet.channel.heals:",
    ),
    "what engines loaded themselves is not compared": Mutation(
        "wiring", "cluster/rank_weight_sync.py", "            carried=self._carried,\n", ""
    ),
    "engines serve, then are verified": Mutation(
        "protocol",
        "weights/sync.py",
        "            self._guarded(self._complete, parts)\n            self._guarded(self._resume)\n",
        "            self._guarded(self._resume)\n            self._guarded(self._complete, parts)\n",
    ),
    "all engines but the last pause": Mutation(
        "protocol",
        "weights/sync.py",
        "on_all(self._receivers, lambda c: c.pause(",
        "on_all(self._receivers[:-1] or self._receivers, lambda c: c.pause(",
    ),
    "one engine's requests are waited for": Mutation(
        "protocol",
        "weights/sync.py",
        "on_all(self._receivers, lambda c: c.flush_cache()",
        "on_all(self._receivers[:1], lambda c: c.flush_cache()",
    ),
    "all engines but the last go on": Mutation(
        "protocol",
        "weights/sync.py",
        "on_all(self._receivers, lambda c: c.resume()",
        "on_all(self._receivers[:-1] or self._receivers, lambda c: c.resume()",
    ),
    "buckets of the version before": Mutation(
        "protocol",
        "weights/sync.py",
        "        self._channel.deliver(prepared, self._receivers, version=self._version)\n",
        "        self._channel.deliver(prepared, self._receivers, version=self._version - 1)\n",
    ),
    "a version ends as the one before": Mutation(
        "protocol",
        "weights/sync.py",
        "self._channel.finish(self._receivers, version=self._version, reports",
        "self._channel.finish(self._receivers, version=self._version - 1, reports",
    ),
    "what was kept for engines stays": Mutation("protocol", "weights/sync.py", "    channel.settle()\n", ""),
    "half of a failed weight sync stays": Mutation("protocol", "weights/sync.py", "        channel.abandon()\n", ""),
    "digests of the first sender alone": Mutation(
        "protocol",
        "weights/sync.py",
        "merged(part.digests for part in parts)",
        "merged(part.digests for part in parts[:1])",
    ),
    "files of the first sender alone": Mutation(
        "protocol",
        "weights/sync.py",
        "[part.report for part in parts if part.sends]",
        "[part.report for part in parts[:1]]",
    ),
    "places in the group by engine, not by rank": Mutation(
        "protocol", "weights/transports/distributed.py", "1 + sum(sizes[:i]) for i, r", "1 + i for i, r"
    ),
    "a group without the newcomer": Mutation(
        "protocol",
        "weights/transports/distributed.py",
        "if self._group is not None and tuple(receivers) == self._members:",
        "if self._group is not None:",
    ),
    "a broadcast of the version before": Mutation(
        "protocol",
        "weights/transports/distributed.py",
        "flush_cache=False, weight_version=version, **words",
        "flush_cache=False, weight_version=version - 1, **words",
    ),
    "a folder of the version before": Mutation(
        "protocol",
        "weights/transports/disk.py",
        "flush_cache=False, weight_version=version)",
        "flush_cache=False, weight_version=version - 1)",
    ),
    "folders that were to be kept go": Mutation(
        "protocol", "weights/transports/disk.py", "            if not self._keep:\n", "            if self._keep:\n"
    ),
    "the function after a write is not called": Mutation(
        "protocol", "weights/transports/disk.py", "            post_write=context.post_write,\n", ""
    ),
    "files of one sender over another's": Mutation(
        "protocol", "weights/transports/disk.py", 'f"model-{self._rank:05d}-', 'f"model-{0:05d}-'
    ),
    "a GPU of its own is the trainer's": Mutation(
        "protocol",
        "weights/transports/mixed.py",
        "set(one.gpu_ids) <= self._training_gpus",
        "set(one.gpu_ids) & self._training_gpus",
    ),
    "one of two ways ends": Mutation(
        "protocol",
        "weights/transports/mixed.py",
        "        for way, own in self._ways(receivers):\n            way.finish(",
        "        for way, own in self._ways(receivers)[:1]:\n            way.finish(",
    ),
    "a copy of a key opens what it opens": Mutation(
        "server", "serving/launch.py", "        return _nobodys_key()\n", "        return str(self)\n"
    ),
    "a pickled key opens what it opens": Mutation(
        "server", "serving/launch.py", "return _nobodys_key, ()", "return str, (str(self),)"
    ),
    "control without the key": Mutation(
        "control",
        "serving/control.py",
        'headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}',
        "headers = dict[str, str]()",
    ),
    "limits of control in milliseconds": Mutation(
        "control",
        "serving/control.py",
        "HTTPConnection(self._host, self._port, timeout=self._timeout_s)",
        "HTTPConnection(self._host, self._port, timeout=self._timeout_s * 1000)",
    ),
    "every pause ends requests": Mutation(
        "control",
        "serving/control.py",
        'self._post("pause_generation", {"mode": mode})',
        'self._post("pause_generation", {})',
    ),
    "a refusal is a success": Mutation(
        "control", "serving/control.py", 'answer.get("success") is False', 'answer.get("success") == "no"'
    ),
    "updates without a version": Mutation(
        "control",
        "serving/control.py",
        '{"flush_cache": flush_cache, "weight_version": str(weight_version)}',
        '{"flush_cache": flush_cache}',
    ),
    "one port for two purposes": Mutation(
        "server",
        "serving/server.py",
        "port, nccl_port = self._lease.ports[:2]",
        "port, nccl_port = self._lease.port, self._lease.port",
    ),
    "every engine has the first seed": Mutation(
        "server",
        "serving/server.py",
        "random_seed=int(args.rollout_seed) + index",
        "random_seed=int(args.rollout_seed)",
    ),
    "no token tells its version": Mutation(
        "server", "serving/server.py", "token_versions=requests_continue(args)", "token_versions=False"
    ),
    "streams repeat what they have said": Mutation(
        "server",
        "serving/server.py",
        '        args["incremental_streaming_output"] = True',
        '        args["incremental_streaming_output"] = False',
    ),
    "a question about health samples a token": Mutation(
        "server",
        "serving/server.py",
        '"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"',
        '"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "1"',
    ),
    "a scheduler is asked without the key": Mutation(
        "server",
        "serving/server.py",
        'request("GET", f"{self.url}/server_info", timeout_s=timeout_s, api_key=self.spec.api_key)',
        'request("GET", f"{self.url}/server_info", timeout_s=timeout_s)',
    ),
    "garbage is frozen without the key": Mutation(
        "server",
        "serving/server.py",
        "timeout_s=timeout_s, api_key=self.spec.keys.control)\n                return",
        "timeout_s=timeout_s)\n                return",
    ),
    "an engine takes memory that is not lent yet": Mutation(
        "server", "serving/server.py", "gated=lends_at_start(args) and shares", "gated=False"
    ),
    "an engine lends what nobody shares": Mutation(
        "server",
        "serving/server.py",
        "memory_saver=bool(args.offload_rollout) and shares",
        "memory_saver=bool(args.offload_rollout)",
    ),
    "one thread for each engine": Mutation(
        "server",
        "serving/server.py",
        "            num_threads=num_threads,\n            api_key=extra",
        "            api_key=extra",
    ),
    "the checkpoint is called version 1": Mutation(
        "server", "serving/server.py", 'args["weight_version"] = "0"', 'args["weight_version"] = "1"'
    ),
    "the second engine meets the first one's ports": Mutation(
        "server",
        "serving/leased_ports.py",
        "        names += [n for _, n in good]\n",
        "        for _, n in good:\n            n.close()\n",
    ),
    "a router that does not know the engines' key": Mutation(
        "server",
        "serving/router.py",
        '({"api_key": self._worker_api_key} if self._worker_api_key else {})',
        "{}",
    ),
    "servers are taken off without the key": Mutation(
        "server",
        "serving/router.py",
        'request("DELETE", address, timeout_s=timeout_s, api_key=self.api_key)',
        'request("DELETE", address, timeout_s=timeout_s)',
    ),
    "a router that asks for no key": Mutation(
        "server",
        "serving/router.py",
        "env={API_KEY_ENV: self.api_key, **NO_PROXIES, **secret}",
        "env={**NO_PROXIES, **secret}",
    ),
    "a router's metrics at its usual port": Mutation(
        "server",
        "serving/router.py",
        '        fields |= {"prometheus_host": "127.0.0.1", "prometheus_port": self._metrics_lease.port}\n',
        "",
    ),
    "a router behind the user's proxy": Mutation(
        "server",
        "serving/router.py",
        "env={API_KEY_ENV: self.api_key, **NO_PROXIES, **secret}",
        "env={API_KEY_ENV: self.api_key, **secret}",
    ),
    "ports of a router are kept": Mutation(
        "server", "serving/router.py", "            self._metrics_lease.release()\n", ""
    ),
    "a weights agent is started without the key": Mutation(
        "server", "serving/agent_process.py", "env={ADMIN_KEY_ENV: self._key, API_KEY_ENV: None}", "env={}"
    ),
    "a weights agent without the user's function": Mutation(
        "server",
        "serving/agent_process.py",
        '        words += ["--pre-read-hook", s.pre_read_hook] if s.pre_read_hook else []\n',
        "",
    ),
    "pairs meet at a usual port": Mutation(
        "server",
        "serving/router.py",
        'body["bootstrap_port"] = bootstrap_of(url)[1]',
        'body["bootstrap_port"] = 8998',
    ),
    "requests are of the version before": Mutation(
        "sequence",
        "cluster/weight_sync_sequence.py",
        "int(metrics[0][WEIGHT_VERSION]) if",
        "int(metrics[0][WEIGHT_VERSION]) - 1 if",
    ),
    "ranks are not told of the lost": Mutation(
        "sequence",
        "cluster/weight_sync_sequence.py",
        "                    self._actors.give_up(*self._engines.infos([engine]))\n",
        "                    pass\n",
    ),
    "requests before there is a cache": Mutation(
        "sequence",
        "cluster/weight_sync_sequence.py",
        "        self._memory.room_for_the_rest()\n"
        "        self._engines.end_sync(self._takers, self._version)\n"
        "\n"
        "    def join",
        "        self._engines.end_sync(self._takers, self._version)\n"
        "        self._memory.room_for_the_rest()\n"
        "\n"
        "    def join",
    ),
    "requests that ended stay so": Mutation(
        "sequence",
        "cluster/weight_sync_sequence.py",
        '            self._actors.on_rollout("resume", for_what',
        '            bool("resume") or self._actors.on_rollout("resume", for_what',
    ),
    "room for the cache before the weights": Mutation(
        "sequence",
        "cluster/weight_sync_sequence.py",
        '"resume_memory", ["weights"]',
        '"resume_memory", ["kv_cache", "cuda_graph"]',
    ),
}
