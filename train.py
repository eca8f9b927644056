"""Synchronous training: generate, train, save, sync weights and evaluate, one after the other.

Every sample trains the weights that sampled it. `train_async.py` overlaps generation with training.
"""

from __future__ import annotations

from slime.cluster.restarting import restarting
from slime.settings import Args, run_or_exit


@restarting
def train(args: Args) -> None:
    """Runs the algorithm. Heavy imports come after the settings are parsed, so that mistakes are reported early."""
    from slime.cluster.launch_run import launch

    with launch(args) as run:
        start = run.restore()
        run.sync_weights()
        if run.evaluates_before(start):
            run.evaluate(start - 1)
        if run.only_serves():
            run.serve()
        for rollout_id in range(start, args.num_rollout):
            batch = run.generate(rollout_id)
            run.hand_over_to_training()
            run.train(rollout_id, batch)
            if run.saves_after(rollout_id):
                run.save(rollout_id)
            run.sync_weights()
            if run.evaluates_after(rollout_id):
                run.evaluate(rollout_id)
            run.end_step(rollout_id)


if __name__ == "__main__":
    run_or_exit(train)
