"""Weight sync: HF and Megatron shards, the layout in engines, transports, and the check that weights arrived."""
