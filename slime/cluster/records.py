"""What a run writes down besides its numbers: which sinks it logs to, and the report at its end."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any

from slime.core.errors import DataError
from slime.observability.report import summary_text, write_report
from slime.observability.run_folder import RunFolder
from slime.observability.sinks import ConsoleSink, Sink, TensorBoardSink, WandbSink

logger = logging.getLogger(__name__)


def make_sinks(args: Any, folder: RunFolder) -> list[Sink]:
    """The views that the settings ask for, the console first."""
    sinks: list[Sink] = [ConsoleSink(num_rollout=args.num_rollout)]
    if args.use_tensorboard:
        parts = [part for part in (args.tb_project_name, args.tb_experiment_name) if part]
        sinks.append(TensorBoardSink(folder.tensorboard.joinpath(*parts)))
    if args.use_wandb:
        suffix = f"-{secrets.token_hex(3)}" if args.wandb_random_suffix else ""
        sinks.append(
            WandbSink(
                settings=args.to_json_dict(),
                project=args.wandb_project,
                entity=args.wandb_team,
                group=args.wandb_group,
                name=f"{args.wandb_group or folder.run_id}{suffix}",
                dir=args.wandb_dir or str(folder.path),
                mode=args.wandb_mode,
                id=args.wandb_run_id,
            )
        )
    return sinks


def leave_report(args: Any, folder: RunFolder) -> None:
    """Writes report.png and report.md and logs the summary; a run that logged no step leaves none."""
    method = args.advantage_estimator if args.loss_type == "policy_loss" else args.loss_type
    title = f"{Path(args.hf_checkpoint).name}: {method}"
    try:
        summary = write_report(folder.metrics, folder.report_png, title=title)
    except (DataError, OSError) as error:
        logger.info("no report: %s", error)
        return
    logger.info("%s\nreport: %s", summary_text(summary), folder.report_png)
