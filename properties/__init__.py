"""The oracle: Hypothesis strategies and the laws that model and kernels must obey."""
