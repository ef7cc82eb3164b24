"""Models for tests."""
