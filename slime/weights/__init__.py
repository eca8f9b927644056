"""Weight sync: HF and Megatron shards, engine layouts, transports, and verification of the weights that were sent."""
