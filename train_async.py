"""One-step-off asynchronous training: step k+1 is generated while step k is trained.

The same verbs as `train.py` in another order. Weights change only between two generations, so every sample has one
weight version, exactly one behind the trainer (`--update-weights-interval` more when it is larger than one).
"""

from __future__ import annotations

from slime.config import Args, run_or_exit


def train_async(args: Args) -> None:
    """The algorithm."""
    from slime.cluster.launch import launch

    with launch(args) as run:
        start = run.restore()
        run.publish_weights()
        if run.evaluates_before(start):
            run.evaluate(start - 1)
        following = run.start_generation(start) if start < args.num_rollout else None
        for rollout_id in range(start, args.num_rollout):
            assert following is not None, f"no generation under way for step {rollout_id}"
            batch = run.finish_generation(following)
            following = run.start_generation(rollout_id + 1) if rollout_id + 1 < args.num_rollout else None
            run.train(rollout_id, batch)
            if run.saves_after(rollout_id):
                run.save(rollout_id)
            if (rollout_id + 1) % args.update_weights_interval == 0 or following is None:
                if following is not None:
                    run.wait_for_generation(following)
                run.publish_weights()
                run.check_log_probs()
            if run.evaluates_after(rollout_id):
                run.evaluate(rollout_id)
            run.end_step(rollout_id)


if __name__ == "__main__":
    run_or_exit(train_async, synchronous=False)
