"""What arithmetic does, bit by bit."""
