"""The batched engine with its local steps compiled by torch.compile, for long runs of small models on a CPU."""
