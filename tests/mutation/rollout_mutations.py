"""Mutations of the wiring of rollout, buffer and graders: a right value not sent, not counted, or another one's."""

from __future__ import annotations

from tests.mutation.record import Mutation

ROLLOUT_WIRING: dict[str, Mutation] = {
    "a group is as old as its newest token": Mutation(
        "saved groups",
        "buffer/groups.py",
        "return min((v for s in group.samples for v in s.weight_versions), default=None)",
        "return max((v for s in group.samples for v in s.weight_versions), default=None)",
    ),
    "a batch is as old as its newest token": Mutation(
        "worker",
        "rollout/sample_metrics.py",
        "oldest = now - min(int(versions.min()) for",
        "oldest = now - max(int(versions.max()) for",
    ),
    "a group is as old as its first sample": Mutation(
        "saved groups",
        "buffer/groups.py",
        "return min((v for s in group.samples for v in s.weight_versions), default=None)",
        "return min((v for s in group.samples[:1] for v in s.weight_versions), default=None)",
    ),
    "the newest finished groups go first": Mutation(
        "saved groups",
        "buffer/data_buffer.py",
        "self._finished.sort(key=lambda record: self.weight_version if record.oldest is None else record.oldest)",
        "self._finished.sort(key=lambda record: -(self.weight_version if record.oldest is None else record.oldest))",
    ),
    "one seed for all executions": Mutation(
        "sampling", "rollout/generate.py", "(args.rollout_seed + index) % 2**31", "args.rollout_seed % 2**31"
    ),
    "one seed for a group": Mutation(
        "sampling",
        "rollout/execute.py",
        "fresh = seeded(args, params, sample.index or 0)",
        "fresh = seeded(args, params, sample.group_index or 0)",
    ),
    "an evaluation's top-k is not sent": Mutation(
        "sampling",
        "rollout/generate.py",
        '        "top_p",\n        "top_k",\n        "min_new_tokens",',
        '        "top_p",\n        "min_new_tokens",',
    ),
    "an evaluation's top-p is not sent": Mutation(
        "sampling",
        "rollout/generate.py",
        '        "top_p",\n        "top_k",\n        "min_new_tokens",',
        '        "top_k",\n        "min_new_tokens",',
    ),
    "an evaluation's penalty is not sent": Mutation(
        "sampling", "rollout/generate.py", '        "repetition_penalty",\n', ""
    ),
    "an evaluation's stop tokens are not sent": Mutation(
        "sampling", "rollout/generate.py", '        "stop_token_ids",\n    )', "    )"
    ),
    "an evaluation has the rollout's top-k": Mutation(
        "sampling", "settings/eval_config.py", '"eval_top_p", "eval_top_k",', '"eval_top_p", "rollout_top_k",'
    ),
    "the rollout's top-k is not sent": Mutation(
        "sampling", "rollout/generate.py", '        "top_k": args.rollout_top_k,', '        "top_k": -1,'
    ),
    "one version for all tokens of an answer": Mutation(
        "plugins",
        "rollout/client/call.py",
        "return [version] * len(self.tokens) if isinstance(version, int) else list(version)",
        "return [version if isinstance(version, int) else version[-1]] * len(self.tokens)",
    ),
    "a posted answer has one version": Mutation(
        "plugins", "rollout/loopback_router.py", "        TOKEN_VERSIONS_KEY: versions,\n", ""
    ),
    "appended tokens have the newest version": Mutation(
        "plugins",
        "core/sample.py",
        "weight_version = meta_info.get(TOKEN_VERSIONS_KEY) or version_of(",
        "weight_version = version_of(",
    ),
    "a group is tried four times": Mutation(
        "tries", "rollout/schedules/group_loop.py", "self.tries[index] < MAX_TRIES", "self.tries[index] <= MAX_TRIES"
    ),
    "a group is quarantined three times": Mutation(
        "tries", "rollout/schedules/group_loop.py", "+ 1 < MAX_TRIES", "< MAX_TRIES"
    ),
    "an interruption is meant three times": Mutation(
        "worker",
        "rollout/schedules/fully_async.py",
        "self.interrupted[group.group_index] < MAX_TRIES",
        "self.interrupted[group.group_index] <= MAX_TRIES",
    ),
    "an evaluation tries four times": Mutation(
        "sampling", "rollout/evaluate.py", "for _ in range(MAX_TRIES):", "for _ in range(MAX_TRIES + 1):"
    ),
    "a post is tried once more": Mutation(
        "plugins",
        "public/http.py",
        "not in RETRY_STATUSES or number + 1 >= max_retries",
        "not in RETRY_STATUSES or number >= max_retries",
    ),
    "a teacher is asked six times": Mutation(
        "teacher",
        "rollout/client/teacher_client.py",
        "for attempt in range(MAX_TRIES):",
        "for attempt in range(MAX_TRIES + 1):",
    ),
    "a grader that dies is asked three times": Mutation(
        "graders", "rewards/pool.py", "for _ in range(MAX_TRIES):", "for _ in range(MAX_TRIES + 1):"
    ),
    "a group is suspect one death late": Mutation(
        "workers", "rollout/workers/worker_fleet.py", "self._deaths[key] >= SUSPECT", "self._deaths[key] > SUSPECT"
    ),
    "no limit of processes": Mutation(
        "programs", "rewards/program_sandbox.py", "MAX_PROCESSES = 32\n", "MAX_PROCESSES = 100_000\n"
    ),
    "no limit of a grader's memory": Mutation(
        "graders",
        "rewards/grader_worker.py",
        "resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))",
        "pass",
    ),
    "the flag of a grader's memory is not handed on": Mutation(
        "graders",
        "rollout/factories.py",
        "memory_limit_bytes=args.reward_memory_limit_mb * 2**20 if args.reward_memory_limit_mb else None,",
        "memory_limit_bytes=None,",
    ),
    "a stale group forgets its attempts": Mutation(
        "saved groups",
        "buffer/data_buffer.py",
        "self._fresh(group, group.attempts + 1) for group in stale",
        "self._fresh(group, 0) for group in stale",
    ),
    "a stale group counts no attempt": Mutation(
        "saved groups",
        "buffer/data_buffer.py",
        "self._fresh(group, group.attempts + 1) for group in stale",
        "self._fresh(group, group.attempts) for group in stale",
    ),
    "a batch forgets attempts": Mutation(
        "saved groups", "buffer/data_buffer.py", "Issued(record.attempts, record)", "Issued(0, record)"
    ),
    "limits of a client swapped": Mutation(
        "tries",
        "rollout/factories.py",
        "        *urls,\n        request_timeout_s=args.request_timeout_s,\n        engine_wait_s=args.engine_wait_s,",
        "        *urls,\n        request_timeout_s=args.engine_wait_s,\n        engine_wait_s=args.request_timeout_s,",
    ),
    "no limit of requests for an engine": Mutation(
        "tries",
        "rollout/factories.py",
        "        engine_wait_s=args.engine_wait_s,\n"
        "        max_concurrency=args.sglang_server_concurrency,\n"
        "        max_kv_use=_max_kv_use(args),\n"
        "        vocab_size=_vocab_size(args.hf_checkpoint),",
        "        engine_wait_s=args.engine_wait_s,\n        vocab_size=_vocab_size(args.hf_checkpoint),",
    ),
}
