"""What the figures look like: surveys of a graph, tables for a terminal, records for scripts. Nothing here prints."""
