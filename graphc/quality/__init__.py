"""What narrowing costs: perplexity, the keys that an indexer chooses, every layer's output, each
beside the plan as it is.

`judge` does it; `ranking` holds the measures of chosen keys.
"""
