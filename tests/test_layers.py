"""The house: imports only go down, the core starts without torch, the public names are these."""

import ast
import importlib
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import lsrdecomp

PACKAGE = Path(lsrdecomp.__file__).parent

GROUND = (
    ("errors", "markup", "threads", "_ordering"),
    ("arrays", "fields"),
    ("precision", "gateway"),
)
NUMBERS = (
    ("kronecker",),
    ("targets",),
    ("formats", "testing"),
    ("solvers",),
    ("shape_search",),
    ("decompose",),
    ("operators",),
    ("analysis",),
    ("plots",),
)
"""The first half: matrices. It could be a package without the second."""
LORA = (
    ("lora.files",),
    ("lora.peft",),
    ("lora.base", "lora.search"),
    ("lora.measure",),
    ("lora.train",),
    ("lora.compress",),
    ("lora.fleet",),
)
"""The second half, the folder ``lora``: adapters of neural networks."""
EDGE = (("lora",), ("cli",))
"""The face of the second half, through which the command line loads its rooms, and that line."""
LAYERS = GROUND + NUMBERS + LORA + EDGE
"""From the ground up; a room imports only from layers below its own (its own files may import each
other)."""

HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}


def rooms_in(layers: tuple[tuple[str, ...], ...]) -> set[str]:
    return {room for layer in layers for room in layer}


def room_at(parts: tuple[str, ...]) -> str:
    """A room is a folder or a file of the package, or a folder of its second half."""
    is_in_lora = parts[0] == "lora" and parts[1:2] not in ((), ("__init__",))
    return ".".join(parts[:2]) if is_in_lora else parts[0]


def room_of(module: str) -> str:
    return room_at(tuple(module.split(".")[1:]))


def room_holding(path: Path) -> str:
    return room_at(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("lsrdecomp.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lsrdecomp"):
            found |= (
                {node.module}
                if "." in node.module
                else {f"lsrdecomp.{alias.name}" for alias in node.names}
            )
    return found


def files() -> list[Path]:
    return sorted(
        path
        for path in PACKAGE.rglob("*.py")
        if path.parent != PACKAGE or path.name not in ("__init__.py", "__main__.py")
    )


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_go_down(path):
    room = room_holding(path)
    for module in imports(path):
        other = room_of(module)
        if other != room:
            assert HEIGHT[other] < HEIGHT[room], (
                f"{room} (storey {HEIGHT[room]}) imports {module} above or beside it"
            )


def test_the_numbers_import_nothing_of_the_adapters():
    """The wall between the halves: it stands whatever the order of rooms within a half."""
    numbers = rooms_in(GROUND + NUMBERS)
    for path in files():
        if room_holding(path) in numbers:
            found = {module for module in imports(path) if room_of(module) not in numbers}
            assert not found, f"{path.relative_to(PACKAGE)} imports {found} across the wall"


def test_every_room_stands_in_one_layer():
    assert {room_holding(path) for path in files()} == rooms_in(LAYERS)
    assert len(HEIGHT) == sum(map(len, LAYERS))


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("solvers", "decompose"),
        ("plots", "solvers"),
        ("lora.peft", "solvers"),
        ("lora.peft", "decompose"),
    ],
)
def test_walls_with_a_reason(room, forbidden):
    for path in files():
        if room_holding(path) == room:
            found = {module for module in imports(path) if room_of(module) == forbidden}
            assert found <= {"lsrdecomp.solvers.solver"}, path  # the records, not the solvers


def test_kernels_never_import_peft():
    assert "peft" not in (PACKAGE / "lora" / "peft" / "kernels.py").read_text()


TORCH_SIDE = {"lora.peft", "lora.base", "lora.train"}
MEASURED_ON_A_BASE = {
    "evaluator.py",
    "features.py",
    "output_meter.py",
    "served_outputs.py",
    "teacher.py",
}
"""The files of ``lora.measure`` that run a base; the others measure files and servers."""
ON_DEMAND = {"torch_truncation.py"}
"""Files that are loaded where a torch tensor is differentiated."""


def test_only_the_torch_side_imports_torch_at_the_top():
    for path in files():
        runs_a_base = path.parent.name == "measure" and path.name in MEASURED_ON_A_BASE
        if room_holding(path) in TORCH_SIDE or runs_a_base or path.name in ON_DEMAND:
            continue
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"torch", "peft", "transformers"}, (
                path
            )


HEAVY = (
    "torch",
    "peft",
    "transformers",
    "matplotlib",
    "ray",
    "sklearn",
    "pandas",
    "tensorly",
    "hypothesis",
)
NUMERICAL = ("numpy", "scipy", "array_api_compat", "ml_dtypes")


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import lsrdecomp", HEAVY + NUMERICAL),
        ("import lsrdecomp.cli.app", HEAVY + NUMERICAL),
        ("from lsrdecomp import *", HEAVY),
        ("from lsrdecomp.analysis import layer_grid", ("lsrdecomp.lora.files", *HEAVY)),
        (
            ("from lsrdecomp.solvers import Krylov; from lsrdecomp import ErrorBudget, decompose"),
            (*HEAVY, "lsrdecomp.analysis.error_curves"),
        ),
    ],
)
def test_cold_import_loads_nothing_that_it_does_not_need(statement, absent):
    code = f"{statement}\nimport sys\nprint(*[name for name in {absent!r} if name in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert loaded == []


FACES = tuple(
    ".".join(("lsrdecomp", *stub.relative_to(PACKAGE).parent.parts))
    for stub in sorted(PACKAGE.rglob("__init__.pyi"))
)


@pytest.mark.parametrize("room", FACES)
def test_every_name_that_a_room_shows_is_there(room):
    """Read from the files: to load some of the rooms takes torch and minutes."""
    face = importlib.import_module(room)
    assert face.__doc__
    assert dir(face) == sorted(face.__all__)
    folder = PACKAGE.joinpath(*room.split(".")[1:])
    for node in ast.parse((folder / "__init__.pyi").read_text()).body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name
            if node.module is None:
                assert (folder / alias.name).is_dir() or (folder / f"{alias.name}.py").exists()
            else:
                assert alias.name in names_in(folder.joinpath(*node.module.split(".")))


def names_in(module: Path) -> set[str]:
    """What a module, or the face of a room, holds at its top."""
    stub = module / "__init__.pyi"
    found = set()
    for node in ast.parse((stub if stub.exists() else module.with_suffix(".py")).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_a_function_is_not_hidden_by_the_module_of_its_name():
    import lsrdecomp.decompose
    import lsrdecomp.kronecker.rearrange
    import lsrdecomp.lora.compress.truncate

    assert callable(lsrdecomp.decompose)
    assert callable(lsrdecomp.lora.compress.truncate)
    assert callable(lsrdecomp.kronecker.rearrange)


def test_the_docstring_is_a_map_of_the_public_names():
    for name in lsrdecomp.__all__:
        if name not in MORE:
            assert f"`{name}`" in lsrdecomp.__doc__, name


MORE = {"LowRank"}
"""What the objects named in the map lead to."""


def test_help_needs_no_optional_package():
    import pydoc

    text = pydoc.render_doc(lsrdecomp, renderer=pydoc.plaintext)
    assert "best_shape" in text
    assert "class CompressionPlan" in text


def files_a_module_needs() -> dict[str, set[str]]:
    return {
        ".".join(("lsrdecomp", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): imports(path)
        for path in files()
    }


def test_no_two_files_want_each_other():
    """Imports within a room have no cycle; the faces (`__init__`) only gather, and are left out."""
    needs = {
        name: wanted
        for name, wanted in files_a_module_needs().items()
        if (PACKAGE.parent / f"{name.replace('.', '/')}.py").exists()
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, (
            f"a cycle of imports: {' -> '.join((*above[above.index(name) :], name))}"
        )
        if name in needs and name not in done:
            for other in needs[name]:
                visit(other, (*above, name))
            done.add(name)

    for name in needs:
        visit(name, ())


def test_the_name_of_a_file_and_of_a_class_is_found_once():
    paths = [path for path in files() if path.name != "__init__.py"]
    names = Counter(path.name for path in paths)
    classes = Counter(
        node.name
        for path in paths
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in (names + classes).items() if count > 1] == []


def test_the_root_holds_few_modules():
    assert len(list(PACKAGE.glob("[!_]*.py"))) <= 9


def test_public_names():
    assert set(lsrdecomp.__all__) == PUBLIC | ROOMS


ROOMS = {
    "analysis",
    "errors",
    "formats",
    "kronecker",
    "lora",
    "operators",
    "plots",
    "solvers",
    "targets",
}
PUBLIC = {
    "ALS",
    "CompressionPlan",
    "ErrorBudget",
    "KroneckerShape",
    "LowRank",
    "LsrError",
    "ProductShape",
    "SVD",
    "SeparatedMatrix",
    "best_shape",
    "compress",
    "decompose",
    "decompose_each",
    "distill",
    "error_curve",
    "load",
    "measure",
    "open_checkpoint",
    "read_statistics",
    "recompress",
    "unit_roundoff",
}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rearrange", "lsrdecomp has no 'rearrange': it is lsrdecomp.kronecker.rearrange"),
        ("decompos", "lsrdecomp has no 'decompos'; did you mean lsrdecomp.decompose"),
        ("logdet", "it is lsrdecomp.operators.logdet"),
        ("truncate", "it is lsrdecomp.lora.compress.truncate"),
        ("compres", "did you mean lsrdecomp.compress"),
        ("markup", "lsrdecomp has no 'markup' yet: import lsrdecomp.markup"),
        ("frobnicate", "lsrdecomp has no 'frobnicate'$"),
        ("qqqqqqq", "lsrdecomp has no 'qqqqqqq'$"),
    ],
)
def test_a_name_that_is_not_here_is_told_where_it_is_or_what_it_is_like(name, words, monkeypatch):
    # A module that another test imported.
    monkeypatch.delitem(lsrdecomp.__dict__, name, raising=False)
    with pytest.raises(AttributeError, match=words):
        getattr(lsrdecomp, name)


def test_an_import_of_a_name_that_is_elsewhere_fails_as_for_any_package():
    """Python words the error itself: it only asks whether a name is there."""
    with pytest.raises(
        ImportError, match="cannot import name 'nearest_kronecker' from 'lsrdecomp'"
    ):
        from lsrdecomp import nearest_kronecker  # noqa: F401
    assert not hasattr(lsrdecomp, "nearest_kronecker")


@pytest.mark.parametrize("name", ["ErrorCurve", "JointALS", "SeparatedProduct", "ShapeError"])
def test_a_name_of_0_2_is_found_in_its_room_alone(name):
    with pytest.raises(AttributeError, match=rf"it is lsrdecomp\.\w+\.{name}"):
        getattr(lsrdecomp, name)


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert lsrdecomp.__version__ == version("lsrdecomp")
