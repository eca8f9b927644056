"""The column of a run's data that holds images (`--multimodal-keys`), read as its checkpoint reads them."""

from __future__ import annotations

from pathlib import Path

from slime.core.files import ImageFolder
from slime.core.hf_config import read_hf_config
from slime.data.images import ImageColumn
from slime.models import family_of
from slime.settings import Args
from slime.settings.groups.data import KIND


def image_column(args: Args) -> ImageColumn | None:
    """None for a run without images. Raises `ConfigError` for a checkpoint that cannot read any."""
    if args.multimodal_keys is None:
        return None
    config, folder = read_hf_config(args.hf_checkpoint), Path(args.hf_checkpoint)
    kept = ImageFolder.of_run(args.run_dir)
    return ImageColumn(args.multimodal_keys[KIND], family_of(config).images(config, folder), kept)
