"""Formats: one file each, describing where the bytes lie."""
