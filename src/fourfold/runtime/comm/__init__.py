"""Messages between ranks: groups, exchanges, point-to-point transfers, sums of gradients.

Enters: steps of exchanges, tensors. Leaves: tensors. What to send, and which way, stands in the lists.
"""
