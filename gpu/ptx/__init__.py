"""The PTX executor: a whole grid on the CPU, every register an array over lanes."""
