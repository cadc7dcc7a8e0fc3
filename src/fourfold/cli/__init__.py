"""The command line: parse, call, print. Nothing is computed here, and nothing heavy imported before it is needed."""

from fourfold.cli.main import main

__all__ = ["main"]
