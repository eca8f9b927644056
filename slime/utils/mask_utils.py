"""Public name of loss masks of conversations, for plugins."""

from slime.data.mask_generator import MultiTurnLossMaskGenerator

__all__ = ["MultiTurnLossMaskGenerator"]
