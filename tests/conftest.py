"""What all tests share: the shared data folder, golden files, one thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve the ranks of a busy machine
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # before torch, as `moec run` does it

import torch

#: Ranks are forked from the test process, which must not have started threads of torch.
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what the code gives into the golden files")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real models, traces and figures; the tests that need it skip where it is absent."""
    folder = Path(os.environ.get("MOEC_SHARED", ROOT.parent / "shared"))
    if not (folder / "models").is_dir():
        pytest.skip(f"no shared data at {folder} (set MOEC_SHARED)")
    return folder


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compare text with a golden file, or write it under --update-golden."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            if os.environ.get("CI"):
                pytest.fail("goldens are never updated in CI")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.is_file(), f"{path} is missing: run pytest --update-golden and review it"
        assert text == path.read_text()

    return check
