"""What the demo and the tests need to run real servers. Imports the standard library only."""
