"""Mutations of the loop: optimizer steps, the critic, the order of prompts, evaluation."""

from __future__ import annotations

from tests.mutation.record import Mutation

STEPS: dict[str, Mutation] = {
    "gradients of the step before": Mutation(
        "steps",
        "training/step/train.py",
        "        zero_grad(trainable)\n        metrics = ",
        "        metrics = ",
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
        "training/model/policy.py",
        "_Share.apply(hidden, self.config.tensor_model_parallel_size)",
        "_Share.apply(hidden, 1)",
    ),
}

ROLLOUT: dict[str, Mutation] = {
    "every epoch in the same order": Mutation(
        "buffer", "buffer/prompts.py", "(self._seed + self.epoch)", "(self._seed)"
    ),
    "no epoch is shuffled": Mutation(
        "buffer", "buffer/prompts.py", "            if self._shuffle:\n", "            if False:\n"
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
        "evaluation", "rollout/episodes/here.py", "hooks.generate, evaluation=True", "hooks.generate, evaluation=False"
    ),
}
