"""slime: LLM post-training that connects Megatron-core (training) with SGLang (rollout) through a Data Buffer.

Importing the package does nothing and imports nothing heavy; `docs/architecture.md` names the room for each duty.
"""

__version__ = "0.1.0"
