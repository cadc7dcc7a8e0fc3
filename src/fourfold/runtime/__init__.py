"""A lowered plan carried out on `torch.distributed`.

Enters: lists of actions, tensors. Leaves: gradients, updated parameters, a timeline and records of what was done. Knows nothing
of costs. Inner rooms: `host` (processes of one machine), `comm` (messages), `zero` (divided weights and optimizer state),
`execution` (the executor), `kernels` (ops on shards).
"""
