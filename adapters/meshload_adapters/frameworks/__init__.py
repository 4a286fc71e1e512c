"""Frameworks: filled buffers become tensors, sharding objects become boxes."""
