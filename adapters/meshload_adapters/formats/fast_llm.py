"""Fast-LLM checkpoints, `distributed` and `fast_llm`; `_fast_llm.py` tells their files."""

from __future__ import annotations

from dataclasses import dataclass

from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError
from meshload.formats import Parts
from meshload.source import Folder, LocalFolder

from .._fast_llm_find import METADATA, is_ours, steps_in


@dataclass(frozen=True, slots=True, eq=False)
class FastLLM:
    """The format of Fast-LLM's own checkpoints."""

    step: int | None = None
    """Which step of a folder of steps; the last finished one by default. When writing: that of the moments, if nothing tells it."""
    decay: str | None = None
    """Which weights decay, which is what flat vectors are sorted by: `matrices` alone, as since June 2026, or `all`."""
    family: str | None = None
    """The Hugging Face family that the model is one of, where the first that fits is not meant (`mistral` for `llama`)."""
    distributed: bool = False
    """When writing: the flat vectors of each rank, and not whole named tensors."""
    layers_per_stage: float = 1.0
    """When writing vectors: how many layers a stage has; stages are dealt to the pipeline ranks in turn."""
    max_shard_size: int = 16 << 30
    """When writing named tensors: how many bytes of them are in one file."""
    name = "fast_llm"
    order = 36
    naming = "fast_llm"
    has_one_place_for_ties = True

    def __post_init__(self) -> None:
        if self.decay not in (None, "matrices", "all"):
            raise LayoutError(f"decay={self.decay!r}: 'matrices' or 'all' was expected")
        if not self.layers_per_stage > 0:
            raise LayoutError(f"layers_per_stage={self.layers_per_stage!r}: a number above 0 was expected")

    def matches(self, folder: Folder) -> bool:
        """Say whether the folder has Fast-LLM's metadata, beside or in its files, or has folders of steps that do."""
        if folder.entry is not None:
            return folder.entry == METADATA and is_ours(folder)
        if is_ours(folder):
            return True
        steps = steps_in(folder)
        return bool(steps) and is_ours(folder.inside(str(steps[-1])))

    def open(self, folder: Folder) -> Checkpoint:
        """Read the metadata and the headers. Damage is collected, where the rest stays usable."""
        from .._fast_llm import checkpoint_in

        return checkpoint_in(folder, self)

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out files of whole tensors or of each rank's vectors, and `metadata.yaml`."""
        from meshload.writing import put

        from .._fast_llm_files import lay_out_named, lay_out_vectors

        if self.distributed:
            decay = self.decay or "matrices"
            lay_out_vectors(folder, like, parts.mesh, self.layers_per_stage, decay, self.step)
        else:
            lay_out_named(folder, like, self.step, self.max_shard_size)
        put(folder, "ok", b"")

    def commit(self, folder: LocalFolder) -> None:
        """Do nothing: `ok`, by which a run knows a save that is finished, stands in the folder that now gets its name."""
