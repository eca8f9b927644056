"""slime: LLM post-training that connects Megatron-core (training) with SGLang (rollout) through a Data Buffer.

Importing the package imports nothing heavy, and makes the import paths of the public slime known
(`slime.public.names`). `docs/architecture.md` names the room for each duty.
"""

from slime.public.names import keep_old_paths

__version__ = "0.1.0"

keep_old_paths()
