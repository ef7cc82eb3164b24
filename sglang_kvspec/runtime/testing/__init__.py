"""What tests of the runtime share."""
