"""Attention pairs, rank groups and request states for tests of the runtime."""
