"""slime: LLM post-training that connects Megatron-core (training) with SGLang (rollout) through a Data Buffer.

Importing the package loads nothing heavy, and registers the import paths of the public slime
(`slime.public.names`). `docs/architecture.md` says which room (folder) is responsible for what.
"""

from slime.public.names import keep_old_paths

__version__ = "0.1.0"

keep_old_paths()
