"""The memory of a step: the lists of a lowered plan, replayed with sizes instead of tensors.

Enters: lists of actions, facts of a device's allocator. Leaves: peak bytes of each rank. Knows nothing of time.
"""
