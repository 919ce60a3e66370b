"""The model: what attention kernels must output, move and take, in NumPy."""
