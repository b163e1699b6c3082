"""C++ kernel templates and micro-kernels; data files, no Python."""
