"""Boundaries put into a graph that was captured without them."""
