"""How the settings themselves are given and checked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ConfigurationSettings:
    """Where settings come from beside the command line, and how strictly they are taken."""

    custom_config_path: str | None = None
    """YAML file with any of these settings by name. The key `custom`, and keys that name no setting, are your own: your
    functions read them as args.custom["name"] or args.name. The latter are listed when the run starts."""
    megatron_config_path: str | None = None
    """YAML file with settings of Megatron that only the policy (role actor) or only the critic has."""
    strict: bool = False
    """A setting that is given and has no effect is an error. Default: it is listed when the run starts."""
