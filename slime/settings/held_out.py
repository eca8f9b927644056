"""How an evaluation dataset is evaluated: by answers that engines sample and graders score, or by its loss.

Fine-tuning learns from conversations as they are. A held-out dataset of such a run that nothing could score is
evaluated in the same way: the mean loss of its trained tokens, by the trainer.
"""

from __future__ import annotations

from typing import Any

from slime.settings.conditions import fine_tunes
from slime.settings.data_files import first_row_names
from slime.settings.eval_config import EvalDatasetConfig, eval_datasets
from slime.settings.groups.hooks import SFT_ROLLOUT


def measures_loss(s: Any, dataset: EvalDatasetConfig) -> bool:
    """Whether a dataset's loss is measured, and nothing sampled for it."""
    if not fine_tunes(s) or s.rollout_function_path != SFT_ROLLOUT or s.eval_function_path is not None:
        return False
    of_run = (s.rm_type, s.custom_rm_path, s.custom_generate_function_path)
    of_data = (dataset.rm_type, dataset.custom_rm_path, dataset.custom_generate_function_path)
    return not any((*of_run, *of_data)) and not first_row_names(dataset.path, "rm_type")


def loss_datasets(s: Any) -> tuple[EvalDatasetConfig, ...]:
    """The datasets whose loss is measured. Raises what `eval_datasets` raises."""
    return tuple(one for one in eval_datasets(s) if measures_loss(s, one))


def samples_evaluations(s: Any) -> bool:
    """Whether an evaluation asks engines. Raises what `eval_datasets` raises."""
    return s.eval_function_path is not None or not all(measures_loss(s, one) for one in eval_datasets(s))
