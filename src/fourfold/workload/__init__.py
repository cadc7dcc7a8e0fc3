"""What is trained: a module with its data and loss, from the text a user writes to a captured graph.

Enters: MODEL texts, factories, plan files. Leaves: a module with its data, its graph, and what planning needs of both, cached
as data. Knows nothing of costs, processes and collectives.
"""
