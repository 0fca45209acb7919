"""What is shipped: the built wheel in a clean virtual environment, and the examples of the pages run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import StartGate
from processes import ROOT

CLIENT = ROOT / "clients" / "python"


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, CLIENT)
    return folder


@pytest.fixture(scope="module")
def clean_python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that has the wheel and what it depends on, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", next(built.glob("*.whl")))
    return python


def test_the_wheel_is_typed_and_the_sdist_whole(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    assert {"kvgate/py.typed", "kvgate/aio.py", "kvgate/testing/plugin.py"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any("test_" in name for name in names)
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "src/kvgate/py.typed"} <= inside
    assert not any(name.startswith("tests") for name in inside)


def test_the_licence_is_the_projects() -> None:
    assert (CLIENT / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_examples_of_the_pages_run_as_they_stand(clean_python: Path, start_gate: StartGate, tmp_path: Path) -> None:
    service = start_gate()
    programs = [("README.md", block) for block in blocks(ROOT / "README.md")]
    programs += [("client", block) for block in blocks(CLIENT / "README.md") if "fake_gate" not in block]
    assert len(programs) >= 4
    for number, (page, program) in enumerate(programs):
        script = tmp_path / f"example-{number}.py"
        script.write_text(program)
        output = run(clean_python, "-W", "error", script, KVGATE_URL=service.url)
        if "lease.action" in program:
            assert "admit" in output, (page, output)
    assert service.state()["budget"]["reserved"] == 0


def test_the_example_of_a_test_runs_as_it_stands(tmp_path: Path) -> None:
    (program,) = (block for block in blocks(CLIENT / "README.md") if "fake_gate" in block)
    # The page says where the first line belongs.
    plugins, rest = re.split(r"(?<=plugin\"\])\n", program, maxsplit=1)
    (tmp_path / "conftest.py").write_text(plugins)
    (tmp_path / "test_page.py").write_text("from kvgate import Gate\n" + rest)
    assert "1 passed" in run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", tmp_path)
