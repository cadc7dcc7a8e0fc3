"""From a graph and a plan to the program of each stage.

Enters: `Graph`, `Plan`. Leaves: `Program`, its steps with their local layouts; the cut into stages; the loss as a sum over
micro-batches. Knows nothing of where ranks run or of what is sent together.
"""
