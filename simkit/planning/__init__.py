"""Who computes which piece of attention: how keys are split, and which CTA gets what."""
