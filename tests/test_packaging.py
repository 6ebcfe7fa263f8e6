"""What pyproject.toml packs is what stands in the folders: a part left out would be missing from the wheel alone."""

from __future__ import annotations

import fnmatch
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("moec", "grammar", "passes", "codegen", "specs")


def setuptools_table() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return table


def folder_of(package: str) -> Path:
    """Where a package of the list lies, by the longest entry of package-dir."""
    mapping = setuptools_table()["package-dir"]
    parts = package.split(".")
    for cut in range(len(parts), 0, -1):
        if (base := ".".join(parts[:cut])) in mapping:
            return ROOT.joinpath(mapping[base], *parts[cut:])
    raise AssertionError(f"{package} has no folder")


def test_every_folder_with_code_is_a_listed_package() -> None:
    listed = setuptools_table()["packages"]
    on_disk = {file.parent for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    assert {folder_of(package) for package in listed} == on_disk
    assert all((folder / "__init__.py").is_file() for folder in on_disk)


def test_every_other_file_is_package_data() -> None:
    table = setuptools_table()
    packed = {
        file
        for package, patterns in table["package-data"].items()
        for pattern in patterns
        for file in folder_of(package).glob(pattern)
    }
    is_build = ("*/__pycache__/*", "*.pyc", "*.py")
    others = {
        file
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and not any(fnmatch.fnmatch(str(file), pattern) for pattern in is_build)
    }
    assert others - packed == set()


def test_package_data_is_found_through_the_import_system() -> None:
    for package, name in {
        "moec": "py.typed",
        "moec.grammar": "moe.lark",
        "moec.codegen": "templates/phase.py.jinja",
        "moec.specs": "clusters/localhost.moe",
    }.items():
        assert (resources.files(package) / name).is_file(), f"{package}: {name}"


def test_type_checkers_follow_the_mapping() -> None:
    """typings/moec links to each mapped folder; `mypy` and `pyright` read the packages through them."""
    links = {link.name: link for link in (ROOT / "typings" / "moec").iterdir()}
    assert set(links) == set(FOLDERS) - {"moec"}
    assert all(link.is_symlink() and link.resolve() == ROOT / name for name, link in links.items())


def test_torch_is_a_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [d for d in project["dependencies"] if d.startswith("torch")] == ["torch>=2.11"]
