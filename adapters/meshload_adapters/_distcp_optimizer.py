"""An optimizer's state in a new DCP checkpoint, as torch's `get_optimizer_state_dict` has it: tensors, steps, groups of weights.

    {root}.state.{name}.{field}             a tensor like the weight; `step`, a number, too
    {root}.param_groups.{i}.{field}         nested; `params` are the names of the group's weights
    {root}.param_groups.{name}.{field}      with flatten_optimizer_state_dict=True, of each weight

Source: https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/state_dict.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshload.box import Box
from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError, listing
from meshload.formats import Parts
from meshload.steps import checked_step, steps_of

from ._distcp_files import NewEntry, chunks_of
from ._param_groups import Group, told_groups
from ._torch_writer import dtype_of

FIELDS = {"momentum": "momentum_buffer"}
"""Kinds that torch calls by another name."""

COUNTED = frozenset(("exp_avg", "exp_avg_sq"))
"""Moments that mean nothing without the count of steps."""

MADE_OF = dict.fromkeys(("wd_mult", "is_expert_parallel"), "weight_decay") | dict.fromkeys(
    ("lr_mult", "is_decoupled_lr", "max_lr", "min_lr"), "lr"
)
"""What Megatron's groups keep to make a hyperparameter of, or to keep them apart: where that one is given, they say nothing."""

Path = tuple[str | int, ...]


@dataclass(slots=True)
class NewState:
    """What is to be stored."""

    entries: list[NewEntry] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    """Of both, in the dict that was saved."""


def paths_of(like: Checkpoint, model: str | None) -> dict[str, Path]:
    """Return where each weight is in the dict that is saved: under a key, under that of a source of this format, or at the top."""
    if model:
        return {name: (model, name) for name in like.arrays}
    told = like.meta.get("paths")
    own = {name: tuple(told.get(name, ())) for name in like.arrays} if isinstance(told, Mapping) else {}
    heads = {path[0] if len(path) == 2 and ".".join(map(str, path)) == name else None for name, path in own.items()}
    return own if len(heads) == 1 and None not in heads else {name: (name,) for name in like.arrays}


def state_of(
    like: Checkpoint,
    parts: Parts,
    *,
    root: str,
    names: Mapping[str, str],
    is_flat: bool,
    hyperparameters: Mapping[str, Any] | None,
    step: int | None,
) -> NewState:
    """Return the state of a checkpoint's optimizer, which has `names` of its own for weights; nothing where it has none."""
    made = NewState()
    owned = [name for name in like.arrays if any(name in arrays for arrays in like.optimizer.values())]
    lost = sorted({n for arrays in like.optimizer.values() for n in arrays} - set(owned))
    if lost:
        raise LayoutError(f"optimizer: no weight is called {listing(lost, 3)}")
    if not owned:
        return made
    counted = [n for n in owned if any(n in like.optimizer.get(kind, ()) for kind in COUNTED)]
    steps = dict.fromkeys(counted, float(checked_step(step))) if step is not None else steps_of(like, counted)
    if counted and steps is None:
        raise LayoutError(
            f"optimizer: which step {listing(like.optimizer)} are of is told nowhere, and Adam's next one depends on it; say it "
            f"with DCP(steps=...)"
        )
    for kind, arrays in like.optimizer.items():
        for name, array in arrays.items():
            key, path = _state(root, names[name], FIELDS.get(kind, kind), is_flat)
            held = parts.get(name, ()) if array.shape == like.arrays[name].shape else ()
            made.entries.append(NewEntry(key, dtype_of(array), array.shape, chunks_of(array.shape, held)))
            made.paths[key] = path
    for name, count in (steps or {}).items():
        key, path = _state(root, names[name], "step", is_flat)
        made.entries.append(NewEntry(key, "float32", (), [(0, Box((), ()))], count))
        made.paths[key] = path
    groups = [(hyper, [names[n] for n in members]) for hyper, members in _grouped(like, owned, hyperparameters)]
    for key, path, value in _groups(groups, root, is_flat):
        made.objects[key], made.paths[key] = value, path
    return made


def _state(root: str, name: str, kind: str, is_flat: bool) -> tuple[str, Path]:
    """Return key and path of a tensor; flattened, the dict under the root has its keys joined already."""
    return f"{root}.state.{name}.{kind}", (root, f"state.{name}.{kind}") if is_flat else (root, "state", name, kind)


# --- groups -----------------------------------------------------------------------------------------------------------


def _groups(groups: Sequence[Group], root: str, is_flat: bool) -> Iterator[tuple[str, Path, Any]]:
    for i, (hyper, names) in enumerate(groups):
        if is_flat:
            if not hyper:
                raise LayoutError(
                    f"optimizer: no hyperparameters of {listing(names, 3)} are told, and a flattened state has no groups without; "
                    f"say them with DCP(hyperparameters={{'lr': ...}})"
                )
            for name in names:
                for key, value in hyper.items():
                    yield f"{root}.param_groups.{name}.{key}", (root, f"param_groups.{name}.{key}"), value
        else:
            for key, value in {**hyper, "params": list(names)}.items():
                yield f"{root}.param_groups.{i}.{key}", (root, "param_groups", i, key), value


def _grouped(like: Checkpoint, owned: Sequence[str], given: Mapping[str, Any] | None) -> list[Group]:
    """Return the groups that the source tells, with what is given besides; one of all weights where it tells none."""
    more = dict(given or {})
    told = [
        ({**{k: v for k, v in hyper.items() if MADE_OF.get(k) not in more}, **more}, [n for n in names if n in like.arrays])
        for hyper, names in told_groups(like)
    ]
    found: list[Group] = [*told] or [(more, [])]
    strange = sorted(set(owned) - {n for _, names in found for n in names})
    if not strange:
        return found
    if any(hyper != found[0][0] for hyper, _ in found):
        raise LayoutError(
            f"optimizer: the source has {len(found)} groups, and does not tell which of them {listing(strange, 3)} is in; say "
            f"hyperparameters that are the same for all, with DCP(hyperparameters=...)"
        )
    return [(found[0][0], list(dict.fromkeys([*(n for _, names in found for n in names), *owned])))]
