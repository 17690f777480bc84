"""Configurations of accelerate, DeepSpeed and the Trainer of transformers, as one of mpdist: `mpdist config --from-...`.

Each key of theirs gets one verdict: translated, means something else here, no equal, nothing to do, or not a key of
that format. What the library would have taken by default, and mpdist would not, is written down.
"""
