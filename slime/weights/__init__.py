"""Weight sync: HF and Megatron shards, layouts of engines, transports, and the verification of sent weights."""
