"""Folders that a wheel has inside the package and a checkout beside it: sources, configuration, results."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def package_folder(name: str, checkout: str, files: tuple[str, ...], remedy: str = "install the package again") -> Path:
    """The folder `name` of the installed package, or `checkout` of the checkout that the package lies in.

    Args:
        name: inside the package.
        checkout: relative to the folder that holds the package.
        files: what it must have.
        remedy: the end of the error's message.

    Raises:
        FileNotFoundError: none of the two has all of the files.
    """
    for folder in (PACKAGE / name, PACKAGE.parent / checkout):
        if all((folder / file).is_file() for file in files):
            return folder
    wanted = ", ".join(f"{checkout}/{file}" for file in files)
    raise FileNotFoundError(f"{wanted}: expected in {PACKAGE} (as {name}/) or {PACKAGE.parent}; {remedy}")
