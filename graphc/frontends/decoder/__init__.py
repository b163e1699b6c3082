"""Decoders with state: their past in flat tensors, one capture for prefill, decode and verify."""
