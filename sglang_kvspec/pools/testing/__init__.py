"""What tests of pools share."""
