"""Fast-LLM checkpoints, `distributed` and `fast_llm`; `_fast_llm.py` tells their files."""

from __future__ import annotations

from dataclasses import dataclass

from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError
from meshload.source import Folder

from .._fast_llm_find import METADATA, is_ours, steps_in


@dataclass(frozen=True, slots=True)
class FastLLM:
    """The format of Fast-LLM's own checkpoints."""

    step: int | None = None
    """Which step of a folder of steps; the last finished one by default."""
    decay: str | None = None
    """Which weights decay, which is what flat vectors are sorted by: `matrices` alone, as since June 2026, or `all`."""
    family: str | None = None
    """The Hugging Face family that the model is one of, where the first that fits is not meant (`mistral` for `llama`)."""
    name = "fast_llm"
    order = 36

    def __post_init__(self) -> None:
        if self.decay not in (None, "matrices", "all"):
            raise LayoutError(f"decay={self.decay!r}: 'matrices' or 'all' was expected")

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
