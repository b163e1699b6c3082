"""Kernels of operators over sequence state (graphc/dsl), generated from their expressions."""
