"""Mutations of the loop: optimizer steps, what is wired to them, the critic, the order of prompts, evaluation."""

from __future__ import annotations

from tests.mutation.record import Mutation

STEPS: dict[str, Mutation] = {
    "gradients of the step before": Mutation(
        "steps",
        "training/step/train_step.py",
        "        zero_grad(trainable)\n        before_train_step(",
        "        before_train_step(",
    ),
    "a clip for each optimizer": Mutation(
        "steps", "training/step/optimizer.py", "total_norm=norm,", "total_norm=float(inner.get_grad_norm()),"
    ),
    "a critic of advantages": Mutation(
        "critic",
        "training/step/micro_batch.py",
        '"returns": aims.returns',
        '"returns": aims.advantages',
    ),
    "a critic felt by every tensor-parallel rank": Mutation(
        "critic",
        "training/model/policy_model.py",
        "lambda grad: grad / self.config.tensor_model_parallel_size",
        "lambda grad: grad",
    ),
}

_LOSS, _MICRO_BATCH = "training/step/loss.py", "training/step/micro_batch.py"
WIRING: dict[str, Mutation] = {
    "entropy without a gradient": Mutation(
        "steps", _LOSS, "entropy_grad=with_entropy and bool(args.entropy_coef)", "entropy_grad=False"
    ),
    "reference and teacher at temperature 1": Mutation(
        "steps",
        _LOSS,
        "temperature=float(args.rollout_temperature) if samples else 1.0",
        "temperature=float(args.rollout_temperature) if samples and not self.whole else 1.0",
    ),
    "the unbiased KL's ratio is the trainer's": Mutation(
        "steps", _LOSS, "old_log_probs=old if args.use", "old_log_probs=recomputed if args.use"
    ),
    "the unbiased KL's ratio is the engine's": Mutation(
        "steps", _LOSS, "old_log_probs=old if args.use", "old_log_probs=batch.rollout_log_probs if args.use"
    ),
    "weights of tokens that no engine sampled": Mutation(
        "steps", "algorithms/off_policy/tis.py", "            tokens.sampled,\n", "            tokens.mask,\n"
    ),
    "rejection of tokens that no engine sampled": Mutation(
        "steps", "algorithms/off_policy/masks.py", "            tokens.sampled,\n", "            tokens.mask,\n"
    ),
    "every trained token was sampled": Mutation("steps", _MICRO_BATCH, "(versions != NOT_SAMPLED) & ", ""),
    "a dynamic global batch is one step": Mutation(
        "steps", _MICRO_BATCH, "1 if one_step else", "1 if one_step or args.use_dynamic_global_batch_size else"
    ),
    "a veto by the ratio of the level": Mutation(
        "steps", "algorithms/off_policy/masks.py", 'sequences, "token", log', "sequences, level, log"
    ),
    "a reducer over the executions of another step": Mutation(
        "steps",
        _MICRO_BATCH,
        "unit=max((prepared.units[p] for p in positions), default=0.0)",
        "unit=max(prepared.units)",
    ),
    "a reducer divides KL and entropy, too": Mutation(
        "steps",
        _LOSS,
        "loss = reduced + weighted(extra, batch)",
        "loss = reduced + weighted(extra, batch) * batch.unit",
    ),
    "means over the tokens of another step": Mutation(
        "steps",
        _MICRO_BATCH,
        "token_share=max((prepared.token_shares[p] for p in positions), default=0.0)",
        "token_share=max(prepared.token_shares)",
    ),
    "a critic alone for a step less": Mutation(
        "steps", "training/backend.py", "or batch.rollout_id >= self", "or batch.rollout_id + 1 >= self"
    ),
    "values are held near their returns": Mutation(
        "steps",
        _MICRO_BATCH,
        '"old_values": prepared.values',
        '"old_values": aims.returns if aims is not None else None',
    ),
    "every step is its own old policy": Mutation(
        "steps", "training/step/reference_policies.py", "return several or bool(read)", "return bool(read)"
    ),
    "the old policy is the newest": Mutation(
        "steps",
        "training/step/reference_policies.py",
        "newer = [v >= self._synced_version",
        "newer = [v >= NOT_SAMPLED",
    ),
    "the reference stays": Mutation(
        "steps",
        "training/step/reference_policies.py",
        "if interval and (rollout_id + 1)",
        "if interval and rollout_id and (rollout_id + 1)",
    ),
    "sequences drift from the trainer": Mutation(
        "steps",
        "algorithms/off_policy/masks.py",
        "            tokens.old_log_probs,",
        "            tokens.trainer_log_probs,",
    ),
    "no clip-higher": Mutation(
        "steps",
        "algorithms/policy_loss/ppo_clip.py",
        "tokens.mask,\n            eps_clip=self.eps_clip,\n            eps_clip_high=self.eps_clip_high",
        "tokens.mask,\n            eps_clip=self.eps_clip,\n            eps_clip_high=self.eps_clip",
    ),
    "adapters of a shape start alike": Mutation(
        "adapters", "training/model/trained.py", 'f"{seed} {own}"', 'f"{seed} {shape}"'
    ),
}
"""Formulas are right, and get their inputs from the wrong weights, tokens or step."""

ROLLOUT: dict[str, Mutation] = {
    "every epoch in the same order": Mutation(
        "buffer", "buffer/samplers/__init__.py", "(self._seed + self.epoch)", "(self._seed)"
    ),
    "no epoch is shuffled": Mutation(
        "buffer", "buffer/samplers/__init__.py", "            if self._shuffle:\n", "            if False:\n"
    ),
    "held-out groups are training's": Mutation(
        "evaluation", "rollout/evaluate.py", "group_index=-1 - number", "group_index=number"
    ),
    "held-out executions are training's": Mutation(
        "evaluation", "rollout/evaluate.py", "index=-1 - first_index", "index=first_index"
    ),
    "datasets share executions": Mutation(
        "evaluation", "rollout/evaluate.py", "        first_index += len(samples)\n", ""
    ),
    "evaluation runs as training": Mutation(
        "evaluation",
        "rollout/workers/episodes.py",
        "hooks.generate, evaluation=True",
        "hooks.generate, evaluation=False",
    ),
}
