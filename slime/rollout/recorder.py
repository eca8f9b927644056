"""The debug recordings of a run: what is written of each step, and what is replayed in its place."""

from __future__ import annotations

from typing import Any

from slime.core.batch import TrainBatch
from slime.rollout import debug_data
from slime.rollout.metrics import sample_metrics
from slime.rollout.threads import beside
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput, SampleGroup
from slime.settings import Args


class Recorder:
    """Writes and reads files as the debug settings say; without them it does nothing."""

    def __init__(self, args: Args) -> None:
        self._args = args

    @property
    def replays(self) -> bool:
        """Steps are read from files, not generated (`--load-debug-rollout-data`)."""
        return self._args.load_debug_rollout_data is not None

    def replay(self, rollout_id: int) -> RolloutFnTrainOutput:
        """The recorded groups of a step. Raises `DataError`."""
        assert self._args.load_debug_rollout_data is not None, "a replay without --load-debug-rollout-data"
        _, groups = debug_data.load_rollout(debug_data.path_of(self._args.load_debug_rollout_data, rollout_id))
        groups = debug_data.head_and_tail(groups, self._args.load_debug_rollout_data_subsample)
        return RolloutFnTrainOutput(groups, sample_metrics(self._args, groups))

    async def save_rollout(self, rollout_id: int, groups: list[SampleGroup]) -> None:
        """`--save-debug-rollout-data` of one step."""
        await self._save_groups(rollout_id, rollout_id, groups)

    async def save_evaluation(self, rollout_id: int, output: RolloutFnEvalOutput) -> None:
        """The same for an evaluation, one file for each dataset."""
        for name, data in output.data.items():
            samples: Any = data.get("samples", ())
            await self._save_groups(f"eval_{rollout_id}_{name}", rollout_id, [[s] for s in samples])

    async def save_batch(self, rollout_id: int, batch: TrainBatch) -> None:
        """`--save-debug-train-data` of one step."""
        if self._args.save_debug_train_data is not None:
            path = debug_data.path_of(self._args.save_debug_train_data, rollout_id)
            await beside(debug_data.save_train_batch, path, batch)

    async def _save_groups(self, name: int | str, rollout_id: int, groups: list[SampleGroup]) -> None:
        """`name` stands for `{rollout_id}` in the path."""
        if self._args.save_debug_rollout_data is not None:
            path = debug_data.path_of(self._args.save_debug_rollout_data, name)
            await beside(debug_data.save_rollout, path, rollout_id, groups)
