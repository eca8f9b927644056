"""The demo: GRPO of SmolLM2-135M-Instruct on a verifiable task, on two CPU cores, through the full stack."""
