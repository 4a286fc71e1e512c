"""Layouts: what each rank holds of each dim."""

from __future__ import annotations

import pytest

from meshload.errors import LayoutError
from meshload.layout import Extent, Layout, Local
from meshload.mesh import Mesh, mesh_of

JOINTS = {"heads": ("kv_heads", "group")}


def at(mesh: str, rank: int, layout: Layout | None = None, **sizes: int) -> Local:
    sized = mesh_of(mesh)
    assert sized is not None
    return (layout or Layout.default()).at(sized, rank, sizes, JOINTS)


def extents(mesh: str, dim: str, layout: Layout | None = None, **sizes: int) -> list[tuple[int, int]]:
    sized = mesh_of(mesh)
    assert sized is not None
    found = [at(mesh, r, layout, **sizes).extent(dim) for r in range(sized.size)]
    return [(e.start, e.count) for e in found]


# --- heads ------------------------------------------------------------------------------------------------------------


def test_query_heads_are_counted_in_heads_and_kv_heads_follow() -> None:
    sizes = {"kv_heads": 4, "group": 2}
    assert extents("tp=2", "kv_heads", **sizes) == [(0, 2), (2, 2)]
    assert extents("tp=2", "group", **sizes) == [(0, 2), (0, 2)]
    assert extents("tp=4", "kv_heads", **sizes) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_b16_with_fewer_kv_heads_than_ranks_each_is_repeated() -> None:
    sizes = {"kv_heads": 4, "group": 2}
    assert extents("tp=8", "kv_heads", **sizes) == [(r // 2, 1) for r in range(8)]
    assert extents("tp=8", "group", **sizes) == [(r % 2, 1) for r in range(8)]


def test_b20_a_norm_over_kv_heads_follows_them() -> None:
    assert extents("tp=4", "kv_heads", kv_heads=2, group=2) == [(r // 2, 1) for r in range(4)]


@pytest.mark.parametrize(("tp", "kv", "group", "rank"), [(2, 3, 2, 0), (3, 4, 2, 1), (4, 6, 2, 3), (8, 4, 3, 4)])
def test_b16_a_cut_of_heads_that_is_no_box_raises_with_the_numbers(tp: int, kv: int, group: int, rank: int) -> None:
    with pytest.raises(LayoutError, match=rf"no box of {kv} kv_heads x {group} group.*; {kv * group} heads over {tp} ranks"):
        at(f"tp={tp}", rank, kv_heads=kv, group=group).extent("kv_heads")


def test_heads_that_do_not_divide_are_cut_by_ceil_where_that_takes_whole_kv_heads() -> None:
    assert extents("tp=2", "kv_heads", kv_heads=3, group=1) == [(0, 2), (2, 1)]
    assert extents("tp=4", "kv_heads", kv_heads=3, group=2) == [(0, 1), (1, 1), (2, 1), (0, 0)]


def test_96_heads_over_6_ranks_are_fine() -> None:
    assert extents("tp=6", "kv_heads", kv_heads=96, group=1) == [(16 * r, 16) for r in range(6)]


def test_cutting_a_joint_dim_and_its_part_is_refused() -> None:
    layout = Layout({"heads": "tp", "kv_heads": "dp"})
    with pytest.raises(LayoutError, match="cuts heads and its part kv_heads"):
        at("tp=2,dp=2", 0, layout, kv_heads=2, group=2).extent("kv_heads")


def test_two_axes_cut_heads_outermost_first() -> None:
    layout = Layout({"heads": ("a", "b")})
    assert extents("a=2,b=2", "kv_heads", layout, kv_heads=8, group=1) == [(0, 2), (2, 2), (4, 2), (6, 2)]


# --- plain dims, padding ----------------------------------------------------------------------------------------------


def test_b27_a_vocabulary_that_does_not_divide_is_uneven_by_ceil() -> None:
    assert extents("tp=4", "vocab", vocab=13) == [(0, 4), (4, 4), (8, 4), (12, 1)]


def test_b30_the_last_part_may_be_short() -> None:
    assert extents("tp=6", "vocab", vocab=16) == [(0, 3), (3, 3), (6, 3), (9, 3), (12, 3), (15, 1)]


def test_b26_padding_makes_equal_parts_and_holds_zeros() -> None:
    layout = Layout.default(pad={"vocab": 16})
    found = [at("tp=4", r, layout, vocab=13).extent("vocab") for r in range(4)]
    assert found == [Extent(0, 4, 4), Extent(4, 4, 4), Extent(8, 4, 4), Extent(12, 1, 4)]


def test_padding_reaches_ranks_that_hold_nothing_else() -> None:
    layout = Layout.default(pad={"vocab": 16})
    assert at("tp=8", 7, layout, vocab=13).extent("vocab") == Extent(13, 0, 2)


def test_a_dim_that_is_padded_already_is_not_padded_again() -> None:
    layout = Layout.default(pad={"vocab": 8})
    assert [at("tp=2", r, layout, vocab=16).extent("vocab") for r in range(2)] == [Extent(0, 8, 8), Extent(8, 8, 8)]


def test_padding_that_does_not_divide_raises_with_both_numbers() -> None:
    with pytest.raises(LayoutError, match="vocab padded to 14 does not divide into 4 equal parts"):
        at("tp=4", 0, Layout.default(pad={"vocab": 2}), vocab=13).extent("vocab")


# --- pipeline stages --------------------------------------------------------------------------------------------------


def stages(mesh: str, layers: int, layout: Layout | None = None) -> list[list[int]]:
    sized = mesh_of(mesh)
    assert sized is not None
    return [list(at(mesh, r, layout, layer=layers).layers) for r in range(sized.size)]


@pytest.mark.parametrize(
    ("layers", "count", "sizes"),
    [(7, 4, [2, 2, 2, 1]), (30, 4, [8, 8, 7, 7]), (10, 3, [4, 3, 3]), (7, 3, [3, 2, 2]), (2, 3, [1, 1, 0])],
)
def test_b05_b07_every_layer_is_on_exactly_one_stage(layers: int, count: int, sizes: list[int]) -> None:
    found = stages(f"pp={count}", layers)
    assert [len(stage) for stage in found] == sizes
    assert [layer for stage in found for layer in stage] == list(range(layers))


def test_b05_a_split_of_ones_own_is_taken() -> None:
    assert [len(s) for s in stages("pp=3", 7, Layout.default(stages=(1, 4, 2)))] == [1, 4, 2]


@pytest.mark.parametrize("counts", [(3, 3), (4, 4, 2), (7, 0, 0, 0)])
def test_b05_a_split_that_does_not_sum_up_raises_with_both_numbers(counts: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=rf"are {len(counts)} with {sum(counts)} layers; 3 with 7 were expected"):
        stages("pp=3", 7, Layout.default(stages=counts))


def test_virtual_stages_take_turns() -> None:
    assert stages("pp=2", 8, Layout.default(virtual=2)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with pytest.raises(LayoutError, match="7 layers over 2 stages with 2 chunks each: 7 is not a multiple of 4"):
        stages("pp=2", 7, Layout.default(virtual=2))


def test_first_and_last_stage_are_those_of_pp() -> None:
    found = [(at("pp=3,tp=2", r, layer=6).is_first, at("pp=3,tp=2", r, layer=6).is_last) for r in range(6)]
    assert found == [(True, False)] * 2 + [(False, False)] * 2 + [(False, True)] * 2
    alone = at("tp=2", 1, layer=6)
    assert (alone.is_first, alone.is_last, list(alone.layers)) == (True, True, list(range(6)))


def test_a_stacked_layer_dim_is_cut_where_stages_are_runs() -> None:
    assert extents("pp=2", "layer", layer=7) == [(0, 4), (4, 3)]
    with pytest.raises(LayoutError, match="hold no run of layers"):
        at("pp=2", 0, Layout.default(virtual=2), layer=8).extent("layer")


# --- experts, rows, blocks --------------------------------------------------------------------------------------------


def test_experts_are_cut_over_ep() -> None:
    assert extents("ep=2,tp=2", "expert", expert=4) == [(0, 2), (0, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize("n", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_rows_are_cut_as_fsdp2_cuts_them(n: int, count: int) -> None:
    torch = pytest.importorskip("torch")
    layout = Layout.default(dp="cut")
    found = [at(f"dp={count}", r, layout).rows(n) for r in range(count)]
    chunks = list(torch.arange(n).chunk(count))  # what fully_shard does to dim 0, the rest of the ranks are empty
    chunks += [torch.arange(0)] * (count - len(chunks))
    assert [list(range(*rows)) for rows in found] == [c.tolist() for c in chunks]


def test_rows_of_several_axes_are_cut_one_after_another() -> None:
    layout = Layout({}, rows=("dp", "cp"))
    assert [at("dp=2,cp=2", r, layout).rows(10) for r in range(4)] == [(0, 3), (3, 5), (5, 8), (8, 10)]


def test_b58_ranks_within_a_block_share_it() -> None:
    found = extents("tp=8", "ffn/128", ffn=512)
    assert found == [((64 * r) // 128, 1) for r in range(8)]


def test_blocks_that_a_cut_falls_on_are_cut_alike() -> None:
    assert extents("tp=2", "ffn/128", ffn=512) == [(0, 2), (2, 2)]
    assert extents("tp=2", "ffn/128", ffn=200 + 56) == [(0, 1), (1, 1)]
    assert extents("tp=1", "ffn/128", ffn=200) == [(0, 2)]


def test_b59_a_cut_inside_a_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(LayoutError, match=r"rank 1 holds elements 129 to 258 of 258, which cuts a block of 128"):
        at("tp=2", 1, ffn=258).extent("ffn/128")


def test_b61_packed_elements_are_cut_on_their_edges_alone() -> None:
    assert extents("tp=3", "ffn//8", ffn=96) == [(0, 4), (4, 4), (8, 4)]
    with pytest.raises(LayoutError, match="cuts a block of 8"):
        at("tp=4", 1, ffn=48).extent("ffn//8")


def test_blocks_over_several_dims_are_those_of_their_run() -> None:
    assert extents("tp=2", "(heads head_dim)/32", kv_heads=4, group=2, head_dim=16) == [(0, 2), (2, 2)]
    assert extents("tp=8", "(kv_heads head_dim)/32", kv_heads=4, group=2, head_dim=16) == [(r // 4, 1) for r in range(8)]


def test_blocks_everywhere_are_whole_on_each_rank() -> None:
    assert extents("tp=2", "ffn/128@", ffn=512) == [(0, 4), (0, 4)]


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_the_default_layout_cuts_by_the_axes_that_are_there() -> None:
    assert extents("dp=2", "ffn", ffn=8) == [(0, 8), (0, 8)]


def test_a_layout_by_an_axis_that_is_not_there_is_refused() -> None:
    with pytest.raises(LayoutError, match="cuts by axis 'tp', the mesh has dp"):
        at("dp=2", 0, Layout({"ffn": "tp"}), ffn=8).extent("ffn")


def test_a_layout_of_a_dim_that_is_not_there_is_refused_and_names_those_that_are() -> None:
    with pytest.raises(LayoutError, match="cuts fnn, no dims of this model; its dims are ffn, heads"):
        at("tp=2", 0, Layout({"fnn": "tp"}), ffn=8)


def test_a_size_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(LayoutError, match="the size of ffn is not known; give it in config="):
        at("tp=2", 0).extent("ffn")


def test_dp_is_replicated_or_cut() -> None:
    with pytest.raises(LayoutError, match="'replicate' or 'cut' was expected"):
        Layout.default(dp="yes")
    assert Layout.default().row_axes(Mesh(("dp",), (2,))) == ()
