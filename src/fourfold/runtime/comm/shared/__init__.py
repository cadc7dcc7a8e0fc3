"""Memory that the ranks of one host share, as a way for messages.

Enters: tensors of ranks on one host. Leaves: their sums and parts. Knows nothing of groups that span hosts.
"""
