"""Passes that make the communication of a graph with ports smaller."""
