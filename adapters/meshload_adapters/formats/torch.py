"""Files of `torch.save` that hold weights; `_torch.py` tells their names."""

from __future__ import annotations

from dataclasses import dataclass

from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError
from meshload.source import Folder

from .._torch_find import consolidated, has_magic, index_name, is_index, is_there, numbered, single_name


@dataclass(frozen=True, slots=True)
class Torch:
    """The format of files that `torch.save` wrote; the least specific, as others consist of such files."""

    variant: str | None = None
    """Such as `fp16`, in Hugging Face's names."""
    embedding_dim: int | None = None
    """Which dim of the embedding Meta's files cut (1 in Llama 1 and 2, 0 in Llama 3), where `params.json` does not tell."""
    name = "torch"
    order = 90

    def __post_init__(self) -> None:
        if self.embedding_dim not in (None, 0, 1):
            raise LayoutError(f"embedding_dim={self.embedding_dim!r}: 0 or 1 was expected")

    def matches(self, folder: Folder) -> bool:
        """Say whether the file is one of torch's or an index of such, or whether the folder has one of the known names."""
        if folder.entry is not None:
            return is_index(folder.entry) or has_magic(folder, folder.entry)
        listed = folder.names()
        if any(is_there(folder, listed, n) for n in (index_name(self.variant), single_name(self.variant))):
            return True
        return any(map(consolidated, listed)) or bool(numbered(listed, self.variant))

    def open(self, folder: Folder) -> Checkpoint:
        """Read the pickles. A shard that is missing or damaged makes its arrays unavailable, and the rest stays usable."""
        from .._torch import checkpoint_in

        return checkpoint_in(folder, self)
