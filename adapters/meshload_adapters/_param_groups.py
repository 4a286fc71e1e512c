"""The groups of an optimizer's weights, with their hyperparameters, as the checkpoints of different formats tell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshload.checkpoint import Checkpoint

Group = tuple[Mapping[str, Any], Sequence[str]]
"""Hyperparameters, and the weights that they are of, where these are told."""


def told_groups(like: Checkpoint) -> list[Group]:
    """Return the groups of DeepSpeed's or DCP's checkpoints, or of universal and Megatron's ones, which name no weights."""
    optimizer, objects = like.meta.get("optimizer"), like.meta.get("objects")
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    if isinstance(groups, Sequence):
        hypers = [{k: v for k, v in g.items() if k not in ("params", "step")} for g in groups if isinstance(g, Mapping)]
        names = like.meta.get("groups") or ()  # DeepSpeed's, which stand beside
        return list(zip(hypers, names if len(names) == len(hypers) else [()] * len(hypers), strict=True))
    return _of_objects(like, objects) if isinstance(objects, Mapping) else []


def _of_objects(like: Checkpoint, objects: Mapping[str, Any]) -> list[Group]:
    """Read the groups of a DCP checkpoint, nested or flattened."""
    fields: dict[str, dict[str, Any]] = {}
    for key in objects:
        head, found, tail = key.rpartition("param_groups.")
        group, _, name = tail.rpartition(".")
        if found and group and (not head or head.endswith(".")):
            fields.setdefault(f"{head}{group}", {"": group})[name] = objects[key]
    nested = [f for f in fields.values() if f[""].isdecimal()]
    if nested:
        ordered = sorted(nested, key=lambda f: int(f[""]))
        return [({k: v for k, v in f.items() if k not in ("", "params", "param_names")}, _names(like, f)) for f in ordered]
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for f in fields.values():
        hyper = {k: v for k, v in f.items() if k}
        same = next((names for told, names in groups if told == hyper), None)
        if same is None:
            groups.append((hyper, same := []))
        same.append(f[""])
    return [(hyper, _bare(like, names)) for hyper, names in groups]


def _names(like: Checkpoint, fields: Mapping[str, Any]) -> list[str]:
    found = fields.get("param_names", fields.get("params"))
    return _bare(like, found) if isinstance(found, list) and all(isinstance(n, str) for n in found) else []


def _bare(like: Checkpoint, names: Sequence[str]) -> list[str]:
    """Return the names of weights that an optimizer's names mean: it leaves out the key under which the model was saved."""
    heads = [head for head in ("", "model.") if all(f"{head}{n}" in like.arrays for n in names)]
    return [f"{heads[0] if heads else ''}{n}" for n in names]
