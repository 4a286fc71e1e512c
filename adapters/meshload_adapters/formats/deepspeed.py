"""DeepSpeed checkpoints; `_deepspeed.py` tells their files and fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from meshload.box import Shape
from meshload.checkpoint import Checkpoint
from meshload.errors import LayoutError, listing
from meshload.formats import Parts
from meshload.source import Folder, LocalFolder

from .._zero_find import is_tag, tags

if TYPE_CHECKING:
    from .._cuts import Cut as Cut
    from .._cuts import Declared


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """The format of the folders that DeepSpeed's `save_checkpoint` writes."""

    weights: str = "module"
    """What `ck[name]` is: the `module`'s weight, or the fp32 `master` where there is one."""
    tag: str | None = None
    """Which tag, where not the one that `latest` names; opened as it is, complete or not."""
    cut: Declared | None = None
    """How tensor-parallel ranks share parameters, where the checkpoint does not say it: globs of names to a dim, None (each
    has the whole), `"mean"`, `"sum"` or a `Cut`; or `"megatron"` or `"gpt_neox"`, whose names are then followed."""
    tied: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Tie of a pipeline -> the layer whose file holds it."""
    parameters: Sequence[str] | None = None
    """The names of the optimizer's parameters in its order, where its state has none, and for writing, where the source does
    not tell it."""
    stage: int = 2
    """Of ZeRO, in the engine for which it is written: 1 or 2."""
    step: int | None = None
    """How many steps the moments are of that are written, where their source does not tell it."""
    name = "deepspeed"
    order = 20
    naming = "hf"

    def __post_init__(self) -> None:
        if self.weights not in ("module", "master"):
            raise LayoutError(f"weights={self.weights!r}: 'module' or 'master' was expected")
        if isinstance(self.parameters, str):
            raise LayoutError(f"parameters={self.parameters!r}: a list of names was expected")
        if self.stage not in (1, 2):
            more = "; for engines of stage 3 write Universal(stage=3)" if self.stage == 3 else ""
            raise LayoutError(f"stage={self.stage!r}: 1 or 2 was expected{more}")
        if self.tied or self.cut is not None:
            from .._cuts import check_declared
            from .._zero import is_count

            if not all(isinstance(tie, str) and is_count(layer) for tie, layer in self.tied.items()):
                raise LayoutError(f"tied={dict(self.tied)!r}: ties to layer numbers were expected")
            check_declared(self.cut)

    def matches(self, folder: Folder) -> bool:
        """Say whether the folder has the files of a tag, or `latest` and a folder that has."""
        if folder.entry is not None:
            return False
        listed = folder.names()
        return is_tag(listed) or ("zero/" not in listed and bool(tags(folder, listed)))

    def open(self, folder: Folder) -> Checkpoint:
        """Read the headers of a tag. Damage makes arrays unavailable; a damaged tag that `latest` names is refused."""
        from .._deepspeed import checkpoint_in

        return checkpoint_in(folder, self)

    def create(self, folder: LocalFolder, like: Checkpoint, parts: Parts) -> None:
        """Lay out the model states, and each rank's partition of masters and moments."""
        from meshload.writing import lay_out, put

        from .._torch_writer import dtype_of, laid_out
        from .._zero_files import model_states, module_of, partitions, training_of

        if self.weights == "master":
            raise LayoutError("weights='master' says what is read; to write masters as weights, convert with dtype='float32'")
        others = {axis: n for axis, n in zip(parts.mesh.names, parts.mesh.sizes, strict=True) if n > 1 and axis != "dp"}
        if others:
            axes = ", ".join(f"{axis}={n}" for axis, n in others.items())
            raise LayoutError(f"mesh: {axes}: only dp can be written as DeepSpeed's own files; write a universal checkpoint")
        training = training_of(like, self.step, type(self).__name__)
        groups = self._groups_for(like, training.shape_of)
        if training.kinds and len(training.groups) != len(groups):
            raise LayoutError(
                f"optimizer: engines take the hyperparameters of their {len(groups)} groups from the file, and the source tells "
                f"those of {len(training.groups)}; convert without optimizer=, or write a universal checkpoint, which needs none"
            )
        tag, ranks = self.tag or f"global_step{training.count}", parts.mesh.size
        states = model_states(like, module_of(like), groups, training.count, ranks=ranks)
        lay_out(folder, f"{tag}/mp_rank_00_model_states.pt", *laid_out(states))
        prefix = "bf16_" if "bfloat16" in {dtype_of(like.arrays[n]) for n in training.shape_of} else ""
        dtypes = {k: dtype_of(next(iter(like.optimizer[k].values()))) for k in training.kinds}
        for rank, root in enumerate(partitions(training, groups, dtypes, ranks, self.stage)):
            lay_out(folder, f"{tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", *laid_out(root))
        put(folder, "latest", tag.encode())

    def commit(self, folder: LocalFolder) -> None:
        """Do nothing: `latest` is in the folder that now gets its name."""

    def _groups_for(self, like: Checkpoint, shape_of: Mapping[str, Shape]) -> list[dict[str, Shape]]:
        """Return the parameters in the optimizer's order, by group, or refuse: a wrong order would be loaded, and be noise."""
        from .._zero import dict_of

        told: Any = like.meta.get("groups") if self.parameters is None else [list(self.parameters)]
        zero = dict_of(dict_of(like.meta.get("ds_config")).get("zero_optimization"))
        if self.parameters is None and zero.get("round_robin_gradients"):
            told = None  # dealt out to as many ranks as there were
        names = [n for group in told or () for n in group]
        if sorted(names) != sorted(shape_of):
            missing, more = [n for n in shape_of if n not in names], [n for n in names if n not in shape_of]
            what = f"lacks {listing(missing, 3)}" if missing else f"names {listing(more, 3)}" if more else "names some twice"
            why = f"what is given {what}" if self.parameters is not None else "the source does not tell it"
            raise LayoutError(
                f"DeepSpeed finds the optimizer's {len(shape_of)} parameters by their order, and {why}; say it with "
                f"DeepSpeed(parameters=[name for name, _ in model.named_parameters()])"
            )
        return [{n: shape_of[n] for n in group} for group in told]


def __getattr__(name: str) -> Any:
    if name != "Cut":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .._cuts import Cut

    return Cut
