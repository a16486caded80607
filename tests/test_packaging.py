"""What a user gets: a wheel with everything in it, a quick command, no torchvision, commands that set up themselves."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vgrpo"
MEGABYTE = 1_000_000


def python(*arguments, cwd=None, executable=sys.executable, isolated=True):
    """Runs Python, when `isolated` without this checkout on its path; returns what it printed."""
    return output([executable, *(["-P"] if isolated else []), *arguments], cwd=cwd, isolated=isolated)


def output(command, *, cwd=None, isolated=True):
    environment = {k: v for k, v in os.environ.items() if not (isolated and k == "PYTHONPATH")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("needs hatchling, of the extra dev")
    folder = tmp_path_factory.mktemp("wheel")
    # in isolation pip would download the backend, and a test has no network
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", folder]
    python("-m", "pip", "wheel", *options, ROOT)
    (path,) = folder.glob("*.whl")
    return path


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_every_file_of_the_package(wheel):
    files = {p.relative_to(ROOT / "src").as_posix() for p in PACKAGE.rglob("*") if p.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    got = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert got == expected
    for kind in (r"recipes/.+\.yaml", r"assets/.+", r"report\.html\.j2", r"py\.typed"):
        assert any(re.fullmatch(f"vgrpo/{kind}", name) for name in got), kind


def test_the_wheel_is_light_and_licensed(wheel):
    assert wheel.stat().st_size < 40 * MEGABYTE
    licences = [name for name in names_in(wheel) if name.endswith("licenses/LICENSE")]
    assert len(licences) == 1
    with zipfile.ZipFile(wheel) as archive:
        assert "Version 2.0, January 2004" in archive.read(licences[0]).decode()
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: >=3.11" in metadata


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(wheel, tmp_path):
    """Outside the checkout, with our dependencies lent by a .pth file, since installing them again takes minutes."""
    venv.create(tmp_path / "clean", with_pip=True)
    clean = tmp_path / "clean" / "bin" / "python"
    python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, executable=clean)
    site = Path(python("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", executable=clean).strip())
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")

    where = Path(python("-c", "import vgrpo; print(vgrpo.__file__)", executable=clean, cwd=tmp_path).strip())
    assert where.is_relative_to(site), "this must not be the checkout"
    command = tmp_path / "clean" / "bin" / "vgrpo"
    assert output([command, "--version"], cwd=tmp_path).strip() == project()["version"]
    listed = output([command, "recipes"], cwd=tmp_path)
    assert set(listed.split()) == {p.stem for p in (PACKAGE / "recipes").glob("*.yaml")} != set()
    read = "from vgrpo.prompts import read_prompts; print(len(read_prompts('asset:scenes/test.jsonl')))"
    assert int(python("-c", read, executable=clean, cwd=tmp_path)) > 0


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version():
    import vgrpo

    assert vgrpo.__version__ == project()["version"]


def test_no_torchvision():
    """One that does not fit the build of torch breaks `import diffusers`; none at all is a supported state."""
    assert importlib.util.find_spec("torchvision") is None
    declared = [r for d in importlib.metadata.distributions() for r in d.requires or [] if "extra" not in r]
    assert not [r for r in declared if re.match(r"torchvision\b", r)]


@pytest.mark.parametrize("module", ["vgrpo", "vgrpo.cli"])
def test_the_command_line_imports_nothing_heavy(module):
    heavy = {"torch", "diffusers", "transformers", "peft", "accelerate", "matplotlib", "scipy", "numpy"}
    loaded = python("-c", f"import sys, {module}; print(*sys.modules)", isolated=False).split()
    assert module in loaded and not heavy & set(loaded)


def test_help_works():
    assert "train" in python("-m", "vgrpo", "--help", isolated=False)


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_pins_are_exact_and_name_no_build_and_no_host():
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", pin) for pin in pins()), "no +cpu, no address, no range"
    assert "torchvision" not in {normal(pin.split("==")[0]) for pin in pins()}


def test_every_dependency_is_pinned_within_its_range():
    from packaging.requirements import Requirement

    versions = {normal(name): version for name, version in (pin.split("==") for pin in pins())}
    declared = [*project()["dependencies"], *(r for rs in project()["optional-dependencies"].values() for r in rs)]
    for requirement in map(Requirement, declared):
        assert requirement.specifier.contains(versions[normal(requirement.name)]), str(requirement)


@pytest.mark.parametrize(("target", "last"), [("demo", "vgrpo train tiny"), ("test", "pytest -q")])
def test_a_command_sets_up_everything_first(target, last):
    """What make would do in an empty clone, in this order."""
    plan = output(["make", "-C", ROOT, "--dry-run", "--always-make", target])
    steps = ["-m venv .venv", "pip install -q -c constraints.txt -e '.[dev,ocr]'", last]
    assert [plan.find(step) >= 0 for step in steps] == [True] * 3, plan
    assert sorted(map(plan.find, steps)) == list(map(plan.find, steps))


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text()
