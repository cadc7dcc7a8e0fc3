"""What limits a plan and what holds it up, as ParaDL lists it: each finding with the layer, the numbers and what to change.

Enters: a lowered plan with its estimate and memory. Leaves: `Finding`s. Measures nothing anew.
"""
