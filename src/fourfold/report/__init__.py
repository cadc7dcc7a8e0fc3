"""What is shown: surveys of a graph, tables for a terminal, records for scripts, pages, traces.

Enters: values of all rooms. Leaves: text, plain data, HTML. Nothing here prints or computes what it shows.
"""
