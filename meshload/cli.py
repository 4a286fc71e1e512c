"""The command line: it parses, calls one public function, and prints. What it can do, Python can do with the same words.

Exit status: 0 as hoped; 1 `check` found damage, or `verify` a difference; 2 anything that could not be done, with one
sentence on stderr.
"""

from __future__ import annotations

import contextlib
import json as json_module
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

LARGE = 60
"""From this many arrays on, those that differ by numbers only share a line."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ends by `SystemExit`."""
    app = _app()
    from .errors import MeshloadError

    warnings.showwarning = _warn
    try:
        app(args=arguments, prog_name="meshload")
    except (MeshloadError, OSError) as error:
        print(f"meshload: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"meshload: note: {message}", file=sys.stderr)


def _app() -> Any:
    import typer

    app = typer.Typer(
        help="Open any large-model checkpoint, and give every rank of any mesh exactly its slices.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    path = typer.Argument(..., help="A checkpoint: a local path or a TensorStore key-value URL.")
    as_json = typer.Option(False, "--json", help="Print JSON.")
    format_ = typer.Option(None, "--format", help="The format's name, where recognising it is not enough.")
    config = typer.Option(None, help="A config.json, or its folder, that says what the checkpoint does not.")
    names = typer.Option(None, help="A naming: hf, native, stored, or another that has a table.")

    def version(shown: bool) -> None:
        if shown:
            from importlib.metadata import version as installed

            print(f"meshload {installed('meshload')}")
            raise typer.Exit

    @app.callback()
    def root(version: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Print the version.")) -> None:
        pass

    @app.command(help="Show names, shapes, dtypes, files and totals.")
    def inspect(
        path: str = path,
        names: str | None = names,
        format: str | None = format_,
        config: str | None = config,
        all: bool = typer.Option(False, "--all", help="A line per array, however many."),
        json: bool = as_json,
    ) -> None:
        from .checking import summary
        from .loading import open

        checkpoint = open(path, format=format, config=config)
        found = summary(checkpoint if names is None else checkpoint.with_names(names))
        _print_json(found) if json else _print_summary(found, path, all)

    @app.command(help="Show what each rank of a mesh would read; no payload is read.")
    def plan(
        path: str = path,
        mesh: str = typer.Option(..., help="Axes with sizes, outermost first: pp=2,tp=4,dp=1."),
        rank: int | None = typer.Option(None, help="One rank; all by default."),
        dp: str = typer.Option("replicate", help="What the dp axis does: replicate, or cut dim 0 as FSDP2 does."),
        layout: str | None = typer.Option(None, help="'replicated', or JSON: name patterns to mesh axes per dim."),
        names: str | None = names,
        include: list[str] | None = typer.Option(None, help="Globs of names to take."),  # noqa: B008
        exclude: list[str] | None = typer.Option(None, help="Globs of names to leave out."),  # noqa: B008
        missing: str = typer.Option("error", help="error or ignore."),
        optimizer: bool = typer.Option(False, help="Also the optimizer's arrays."),
        exchange: bool | None = typer.Option(None, help="Whether processes share reads; by default over networks alone."),
        max_bytes: int | None = typer.Option(None, help="Ceiling of memory beside the result."),
        merge_gap: int | None = typer.Option(None, help="Unwanted bytes that are read rather than skipped."),
        format: str | None = format_,
        config: str | None = config,
        json: bool = as_json,
    ) -> None:
        from .layout import Layout
        from .loading import plan as planned
        from .mesh import parse_mesh

        made = planned(
            path,
            mesh=parse_mesh(mesh),
            rank="all" if rank is None else rank,
            layout=_layout(layout) if layout else Layout.default(dp=dp),
            names=names,
            include=include or None,
            exclude=exclude or None,
            missing=missing,
            optimizer=optimizer,
            exchange=exchange,
            max_bytes=max_bytes,
            merge_gap=merge_gap,
            format=format,
            config=config,
        )
        found = made.summary()
        _print_json(found) if json else _print_plan(found, made.sharing)

    @app.command(help="Compare index, headers and file sizes. Exit status 1 where something is wrong.")
    def check(
        path: str = path,
        copies: bool = typer.Option(False, help="Also read and compare replicated copies."),
        blobs: bool = typer.Option(False, help="Also compare a hub cache's blobs with the hashes that they are named by."),
        format: str | None = format_,
        config: str | None = config,
        json: bool = as_json,
    ) -> None:
        from .checking import check as checked

        report = checked(path, format=format, config=config, copies=copies, blobs=blobs)
        if json:
            _print_json(_report(report))
        else:
            _print_problems(report)
            print(f"{path}: {report.arrays} arrays, {len(report.problems)} problems")
        if not report.ok:
            raise typer.Exit(1)

    @app.command(help="Write a checkpoint again in another format; the target appears when all of it is there.")
    def convert(
        src: str = path,
        dst: str = typer.Argument(..., help="A new local folder."),
        to: str = typer.Option(..., help="A format that can be written, such as hf or orbax."),
        mesh: str | None = typer.Option(None, help="The mesh that will read it: tp=4. What depends on it is cut accordingly."),
        dtype: str | None = typer.Option(None, help="Cast floating arrays to this: bf16, fp16, fp32."),
        names: str | None = names,
        optimizer: list[str] | None = typer.Option(None, help="Also the optimizer's arrays of this kind, or 'all'."),  # noqa: B008
        include: list[str] | None = typer.Option(None, help="Globs of names to take."),  # noqa: B008
        exclude: list[str] | None = typer.Option(None, help="Globs of names to leave out."),  # noqa: B008
        resume: bool = typer.Option(False, help="Go on with an interrupted conversion."),
        max_bytes: int | None = typer.Option(None, help="Ceiling of memory; 512 MiB by default."),
        format: str | None = format_,
        config: str | None = config,
        json: bool = as_json,
    ) -> None:
        from time import perf_counter

        from .checking import summary
        from .converting import convert as converted
        from .loading import open
        from .mesh import parse_mesh
        from .ranks import joined

        with joined() as group:
            begin = perf_counter()
            converted(
                src,
                dst,
                to=to,
                mesh=parse_mesh(mesh) if mesh else None,
                dtype=dtype,
                names=names,
                optimizer=_kinds(optimizer),
                include=include or None,
                exclude=exclude or None,
                resume=resume,
                max_bytes=max_bytes,
                format=format,
                config=config,
                progress=True,
            )
            seconds = perf_counter() - begin
            if group.rank:
                return
        found = summary(open(dst, format=to))
        n, nbytes = found["total_arrays"], found["total_bytes"]
        if json:
            _print_json({"path": dst, "format": to, "arrays": n, "bytes": nbytes, "seconds": seconds})
        else:
            rate = human(int(nbytes / max(seconds, 1e-9)))
            print(f"{dst}: {to}, {n} arrays, {human(nbytes)} in {seconds:.1f} s ({rate}/s)")

    @app.command(help="Let Orbax and TensorStore read a checkpoint where it lies; no payload is copied.")
    def index(
        src: str = path,
        dst: str | None = typer.Argument(None, help="A folder for the index, with links; by default it lies beside the files."),
        names: str | None = names,
        format: str | None = format_,
        config: str | None = config,
        json: bool = as_json,
    ) -> None:
        from .indexing import index as indexed

        made = indexed(src, dst, names=names, format=format, config=config)
        if json:
            sizes = {"shown_bytes": made.shown_bytes, "bytes": made.nbytes}
            said = {"path": str(made.path), "format": made.format, "arrays": list(made.arrays), **sizes}
            _print_json(said | {"left_out": dict(made.left_out)})
        else:
            for name, why in made.left_out.items():
                print(f"left out: {name}: {why}")
            shown = f"{len(made.arrays)} arrays, {human(made.shown_bytes)}, shown by an index of {human(made.nbytes)}"
            print(f"{made.path}: {made.format}, {shown}")

    @app.command(help="Compare two checkpoints, bit for bit or within a tolerance. Exit status 1 where they differ.")
    def verify(
        a: str = path,
        b: str | None = typer.Argument(None, help="Another checkpoint; in any format, names and topology."),
        rtol: float = typer.Option(0.0, help="Allowed difference, relative to B's value."),
        atol: float = typer.Option(0.0, help="Allowed difference."),
        digest: bool = typer.Option(False, "--digest", help="Print the digest of A instead, or compare A with a digest file B."),
        output: str | None = typer.Option(None, "--output", "-o", help="Store the digest in this file."),
        names: str | None = names,
        optimizer: list[str] | None = typer.Option(None, help="Also the optimizer's arrays of this kind, or 'all'."),  # noqa: B008
        format: str | None = format_,
        config: str | None = config,
        json: bool = as_json,
    ) -> None:
        from .checking import Report
        from .checking import digest as digested
        from .checking import verify as verified
        from .checkpoint import Problem
        from .digests import Digest
        from .errors import LayoutError
        from .ranks import joined

        if digest:
            wanted = None if b is None else Digest.load(b)
            if output and (os.path.isdir(output) or not os.path.isdir(os.path.dirname(os.path.abspath(output)))):
                raise LayoutError(f"--output {output}: a file in a folder that exists was expected")
            with joined() as group:
                found = digested(a, names=names, optimizer=_kinds(optimizer), format=format, config=config, progress=True)
            if output and group.rank == 0:
                found.save(output)
            if group.rank:
                return
            if wanted is None:
                _print_json(found.to_json()) if json else print(found)
                return
            problems = [Problem(what, array=name) for name, what in found.differences(wanted)]
            problems += [Problem(f"it is not in {b}", array=name) for name in found.arrays if name not in wanted.arrays]
            problems += [Problem(f"it is not in {a}", array=name) for name in wanted.arrays if name not in found.arrays]
            problems += [Problem(f"{b} has the digest of a part of it only", array=name) for name in wanted.partial]
            report = Report(tuple(problems), len(found.arrays))
        elif b is None:
            raise LayoutError("two checkpoints are compared: name a second one, or use --digest")
        elif format or output:
            raise LayoutError("--format and --output go with --digest")
        else:
            kinds = _kinds(optimizer)
            with joined() as group:
                report = verified(a, b, rtol=rtol, atol=atol, names=names, optimizer=kinds, config=config, progress=True)
        if group.rank:
            pass  # the first process tells it
        elif json:
            apart = {name: far if math.isfinite(far) else str(far) for name, far in report.apart.items()}
            _print_json(_report(report) | {"apart": apart})
        else:
            _print_problems(report)
            for name, far in report.apart.items():
                print(f"{name}: {far:g} apart at most")
            print(f"{a} and {b}: {report.arrays} arrays, {'the same' if report.ok else f'{len(report.problems)} differences'}")
        if not report.ok:
            raise typer.Exit(1)

    return app


def _kinds(optimizer: list[str] | None) -> bool | list[str]:
    """Return which of the optimizer's arrays are meant."""
    return "all" in optimizer or optimizer if optimizer else False


def _report(report: Any) -> dict[str, Any]:
    problems = [{"text": p.text, "array": p.array, "file": p.file, "rank": p.rank} for p in report.problems]
    return {"ok": report.ok, "arrays": report.arrays, "problems": problems}


def _print_problems(report: Any) -> None:
    for p in report.problems:
        print(": ".join(word for word in (p.file, p.array, p.text) if word))


def _layout(text: str) -> Any:
    from .errors import LayoutError

    if text == "replicated":
        return text
    try:
        found = json_module.loads(text)
    except (json_module.JSONDecodeError, RecursionError) as error:
        raise LayoutError(f"--layout {text!r} is neither 'replicated' nor JSON: {error}") from error
    if not isinstance(found, dict):
        raise LayoutError(f"--layout {text!r}: a JSON object of name patterns was expected")
    return found


def _print_json(value: Any) -> None:
    print(json_module.dumps(value, indent=1))


def _print_summary(found: dict[str, Any], path: str, all: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("name", "dtype", "shape", "bytes", "files"):
        table.add_column(column, justify="right" if column == "bytes" else "left", no_wrap=column != "name", overflow="fold")
    rows = _grouped(found["arrays"]) if len(found["arrays"]) > LARGE and not all else _plain(found["arrays"])
    for row in rows:
        table.add_row(*map(Text, row))
    _console().print(table)
    for alias, name in found["aliases"].items():
        print(f"{alias} is {name}")
    for kind, n in found["optimizer"].items():
        print(f"optimizer {kind}: {n} arrays")
    for name, why in found["unavailable"].items():
        print(f"unavailable: {name}: {why}")
    print(f"{path}: {found['format']}, {found['total_arrays']} arrays, {human(found['total_bytes'])}", end="")
    print(f", optimizer {human(found['optimizer_bytes'])}" if found["optimizer"] else "")


def _console() -> Any:
    """Return where tables are printed: as wide as the terminal, or wide enough where it goes to a file."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 240)


def _plain(arrays: dict[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    for name, a in arrays.items():
        yield name, a["dtype"], _shape(a["shape"]), human(a["nbytes"]), _files(a["files"])


def _grouped(arrays: dict[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """Let arrays share a line whose names differ by numbers only, and which are alike otherwise."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, a in arrays.items():
        groups.setdefault((re.sub(r"\d+", "#", name), a["dtype"], tuple(a["shape"])), []).append(name)
    for (_, dtype, shape), names in groups.items():
        files = sorted({f for n in names for f in arrays[n]["files"]})
        times = f" (x{len(names)})" if len(names) > 1 else ""
        yield _ranges(names) + times, dtype, _shape(shape), human(sum(arrays[n]["nbytes"] for n in names)), _files(files)


def _ranges(names: list[str]) -> str:
    """Write names that differ by numbers as one.

    >>> _ranges(["a.0.b", "a.1.b"])
    'a.[0-1].b'
    """
    words = [re.split(r"(\d+)", name) for name in names]
    joined = []
    for column in zip(*words, strict=True):
        distinct = set(column)
        joined.append(column[0] if len(distinct) == 1 else f"[{min(map(int, distinct))}-{max(map(int, distinct))}]")
    return "".join(joined)


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _files(files: list[str]) -> str:
    return ", ".join(files) if len(files) <= 2 else f"{files[0]} .. {files[-1]} ({len(files)})"


def _print_plan(found: dict[str, Any], sharing: str) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("rank", "arrays", "wanted", "read", "requests", "result", "peak beside it"):
        table.add_column(column, justify="right")
    for rank, r in found["ranks"].items():
        sizes = [human(r[k]) for k in ("wanted_bytes", "read_bytes")]
        table.add_row(str(rank), str(r["arrays"]), *sizes, str(r["reads"]), human(r["result_bytes"]), human(r["peak_bytes"]))
    _console().print(table)
    if found["replicas"] > 1:
        print(f"{found['replicas']} ranks hold each slice")
    for word in ("replicated", "repeated", "padded", "tied", "missing", "unexpected"):
        names = found[word]
        if names:
            print(f"{word}: {_names(names)}")
    for note in found["notes"]:
        print(note)
    print(sharing)
    total = found["total"]
    print(f"in all: wanted {human(total['wanted_bytes'])}, read {human(total['read_bytes'])} in {total['reads']} requests")


def _names(names: list[str]) -> str:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    shown = [_ranges(g) for g in groups.values()]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more kinds" if len(shown) > 12 else "")


def human(nbytes: int) -> str:
    """Write a number of bytes for people.

    >>> human(1536), human(12)
    ('1.5 KiB', '12 B')
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@contextlib.contextmanager
def progress_bar() -> Iterator[Any]:
    """Show a bar on the terminal while bytes move; where stderr is no terminal, show nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("moving"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("moving", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
