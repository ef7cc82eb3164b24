"""Simulation of rounds whose draft lengths follow different policies."""
