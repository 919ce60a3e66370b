"""What others have measured, and what the cycle model says to it."""
