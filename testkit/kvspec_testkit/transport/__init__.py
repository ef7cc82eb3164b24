"""Networks that misbehave, for tests and benchmarks of the transport."""
