"""New universal checkpoints: which files they have, and what is saved in each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshload.box import Box, Shape
from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError, listing
from meshload.formats import Parts
from meshload.source import LocalFolder
from meshload.writing import lay_out, put

from ._torch_writer import dtype_of, laid_out, new_scalar, new_tensor
from ._zero_files import UNIVERSAL_VERSION, VERSION, Training, model_states, module_of, training_of, zero_stage
from ._zero_find import STATE

if TYPE_CHECKING:
    from .formats.universal import Universal

_FOLDER = re.compile(r"(?!\.{1,2}$)[^/\0]{1,255}")


def lay_out_tag(folder: LocalFolder, like: Checkpoint, parts: Parts, options: Universal) -> None:
    """Lay out the model states, and a file for each master and moment."""
    wrong = [name for name in like.arrays if not _FOLDER.fullmatch(name)]
    if wrong:
        raise LayoutError(f"{listing(wrong, 3)}: a weight's name is that of its folder, and cannot be such")
    training = training_of(like, options.step, type(options).__name__)
    tag = options.tag or f"global_step{training.count}_universal"
    for file, root in _files(like, training, parts, options.stage):
        lay_out(folder, f"{tag}/{file}", *laid_out(root))
    put(folder, "latest_universal", tag.encode())


def _files(like: Checkpoint, training: Training, parts: Parts, stage: int) -> Iterator[tuple[str, Any]]:
    """Go through the files in the folder of a tag, with what is saved in each."""
    rank = "zero_pp_rank_0_" if stage == 3 else ""
    info = {"universal_checkpoint_version": UNIVERSAL_VERSION}
    module = module_of(like)
    yield f"{rank}mp_rank_00_model_states.pt", model_states(like, module, [training.shape_of], training.count, info)
    groups = [*training.groups, *({} for _ in training.shape_of)][: max(len(training.shape_of), len(training.groups))]
    numbered = [{**group, "params": [i]} for i, group in enumerate(groups)]
    state = {0: {"step": new_scalar(training.step)}} if training.step is not None else {}
    yield (
        f"zero/{STATE}",
        {
            "zero_stage": zero_stage(stage),
            "ds_version": VERSION,
            "param_groups": numbered,
            "optimizer_state_dict": {"state": state, "param_groups": numbered},
        },
    )
    for name, shape in training.shape_of.items():
        more = {"cat_dim": _cat_dim(name, shape, parts)} if parts else {"cat_dim": 0}
        more = {k: v for k, v in more.items() if v is not None}
        dtypes = {kind: dtype_of(like.optimizer[kind][name]) for kind in training.kinds}
        for file, dtype in {"fp32": "float32", **dtypes}.items():
            yield f"zero/{name}/{file}.pt", {**more, "param": new_tensor(dtype, shape)}
        if training.kinds and training.step is not None:
            yield f"zero/{name}/step.pt", new_scalar(training.step)


def _cat_dim(name: str, shape: Shape, parts: Parts) -> int | None:
    """Return the dim that tensor-parallel ranks cut; None where each has the whole."""
    mesh = parts.mesh
    count = mesh.size_of("tp") if "tp" in mesh else 1
    if count == 1:
        return 0
    held: dict[tuple[int, ...], dict[int, Box]] = {}
    for rank, box in parts.get(name, ()):
        place = mesh.coordinates(rank)
        t = place.pop("tp")
        held.setdefault(tuple(place.values()), {})[t] = box
    boxes = next(iter(held.values()), {})
    if len(boxes) == count:
        dims = [d for d in range(len(shape)) if len({box.start[d] for box in boxes.values()}) > 1]
        if not dims:
            return None
        d = dims[0]
        if len(dims) == 1 and all(box.start[d] == t * shape[d] // count == t * box.shape[d] for t, box in boxes.items()):
            return d
    raise LayoutError(
        f"{name}: the {count} ranks of tp hold no equal parts of one dim of {shape}, which are all that DeepSpeed cuts"
    )
