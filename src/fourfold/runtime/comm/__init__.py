"""Messages between ranks: groups, exchanges, point-to-point transfers, sums of gradients.

Enters: steps of exchanges, tensors. Leaves: tensors. The lists say what to send, and by which path.
"""
