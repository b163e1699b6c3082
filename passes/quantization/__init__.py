"""Passes over the arithmetic of quantized models."""
