"""What the settings of deltas mean together, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.settings import parse_args
from tests.support.command_line import complete

DELTA = ("--update-weight-mode", "delta")
LOCAL = ("--update-weight-local-checkpoint-dir", "/tmp/weights")


def test_deltas_choose_the_disk_transport(tmp_path: Path) -> None:
    args = parse_args([*complete(tmp_path), *DELTA, *LOCAL, "--check-weight-update-equal"])
    assert args.update_weight_transport == "disk" and args.update_weight_delta_encoding == "xor"
    assert not {name for name in args.idle if "weight" in name}


def test_the_public_name_of_the_hook_of_engines(tmp_path: Path) -> None:
    flags = [*complete(tmp_path), *DELTA, *LOCAL]
    args = parse_args([*flags, "--sglang-custom-pull-weights-pre-read-hook", "examples.small_hooks:log_read"])
    assert args.custom_pull_weights_pre_read_path == "examples.small_hooks:log_read"


@pytest.mark.parametrize(
    "flags, refused",
    [
        ([*DELTA, *LOCAL, "--update-weight-transport", "nccl"], "deltas are files"),
        ([*DELTA], "requires --update-weight-local-checkpoint-dir"),
        (["--no-check-weight-update-equal"], "every weight sync is verified"),
        ([*DELTA, *LOCAL, "--update-weight-delta-encoding", "rle"], "rle"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, flags: list[str], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        parse_args([*complete(tmp_path), *flags])


@pytest.mark.parametrize(
    "flags, idle",
    [
        (["--update-weight-delta-encoding", "overwrite"], "update_weight_delta_encoding"),
        (["--update-weight-folder-only"], "update_weight_folder_only"),
        (
            ["--custom-update-weight-post-write-path", "examples.small_hooks:log_version"],
            "custom_update_weight_post_write_path",
        ),
    ],
)
def test_what_has_no_effect_without_deltas_is_listed(tmp_path: Path, flags: list[str], idle: str) -> None:
    assert idle in parse_args([*complete(tmp_path), *flags]).idle
