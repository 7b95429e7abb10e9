"""Build the API reference from docstrings: a page for every module of the package, with pdoc.

    python scripts/build_docs.py [--out build/api]

What a front end imports may belong to another environment: NeMo, Megatron-Bridge, lm-evaluation-harness. Where one of
these is missing, stand-ins take its place, as Sphinx's autodoc_mock_imports does, so that one environment documents all
modules; of their classes the reference then has the names alone. Whatever pdoc warns of fails the build: an annotation
or a docstring that it could not read.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import re
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
# As imported. In other environments, or none where documentation is built.
FOREIGN = ("lightning", "lm_eval", "megatron.bridge", "megatron.training", "nemo", "nemo_run")
# Modules are named one by one, because `echo_megatron` lists what it exports, which ends pdoc's own search there; of
# other packages it then has them twice. The fields of a dataclass that inherits some are looked up in its own module.
EXPECTED = re.compile(r"a module with this name has already been added|__init__\. Import of \w+ failed")


class _Attributes(type):
    """Gives a stand-in every attribute that it is asked for; classes of ours that inherit from one have theirs."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("_") or cls.__bases__ != (StandIn,):
            raise AttributeError(name)
        return stand_in(name, f"{cls.__module__}.{cls.__qualname__}")


class StandIn(metaclass=_Attributes):
    """Whatever is imported from a package that is missing: a base class, a function, what makes a decorator."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__[T](self, decorated: T) -> T:
        return decorated


def stand_in(name: str, module: str) -> type:
    return _Attributes(name, (StandIn,), {"__module__": module})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name, self.__name__)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder of imports: makes modules of `FOREIGN` that no other finder has."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = next((package for package in FOREIGN if f"{name}.".startswith(f"{package}.")), None)
        if package is None:
            return None
        self.packages.add(package)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def modules(package: Path) -> list[str]:
    """Names of all public modules of a package's folder, packages among them."""
    names = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            names.append(".".join(parts))
    return names


def build(package: Path, out: Path) -> list[str]:
    """Writes the reference of a package.

    Args:
        package: its folder.
        out: the folder that is written anew.

    Returns:
        What is wrong with it; nothing where all is well.
    """
    import pdoc

    finder = StandIns()
    sys.meta_path.append(finder)
    names, problems = modules(package), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the packages that are imported have to say of themselves
        for name in names:
            try:
                module = importlib.import_module(name)
                for exported in getattr(module, "__all__", ()):
                    setattr(module, exported, getattr(module, exported))  # pdoc does not see what is imported late
            except Exception as error:  # whatever a module raises, the others are looked at as well
                problems.append(f"{name}: {type(error).__name__}: {error}")
    if problems:
        return problems
    shutil.rmtree(out, ignore_errors=True)
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc(*names, output_directory=out)
    problems += [text for warning in caught if (text := str(warning.message)) and not EXPECTED.search(text)]
    problems += [
        f"{name}: no page" for name in names if not out.joinpath(*name.split(".")).with_suffix(".html").is_file()
    ]
    if finder.packages:
        print(f"stand-ins for {', '.join(sorted(finder.packages))}, not installed here")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0 good, 1 something is wrong with the reference."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", type=Path, default=ROOT / "echo_megatron", help="its folder; default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("build/api"), help="default %(default)s")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(options.package.resolve().parent))
    problems = build(options.package.resolve(), options.out)
    for problem in problems:
        print(f"build_docs: {problem}", file=sys.stderr)
    if not problems:
        print(f"{options.out}: {len(list(options.out.rglob('*.html')))} pages")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
