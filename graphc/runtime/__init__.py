"""A Plan at work: the native executor and its Session. Imports no torch and no compiler."""
