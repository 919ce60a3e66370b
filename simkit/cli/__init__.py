"""The simkit command."""
