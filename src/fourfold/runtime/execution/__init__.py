"""A stage's lists bound to one rank and run; stages joined to a step.

Enters: a lowered plan, stored tensors, a batch. Leaves: the loss, outputs, gradients. Decides nothing about order.
"""
