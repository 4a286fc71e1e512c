"""Adapters of meshload: formats, frameworks and model tables."""
