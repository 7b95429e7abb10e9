"""Download published shards: resumed where they stopped, retried a bounded number of times, complete or absent."""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from echo_megatron.data.files import CHUNK_BYTES

TIMEOUT_S = 60.0
ATTEMPTS = 5
FIRST_PAUSE_S = 1.0


def read_url_list(path: Path, contains: str | None = None) -> list[str]:
    """URLs of a list file, one a line; blank lines and lines with # are skipped.

    Args:
        path: the file, e.g. `urls/v1_6.txt` of the data set allenai/dolma.
        contains: keep only URLs with this in them, e.g. "/c4/".

    Raises:
        ValueError: a line is no http(s) URL, two would get the same file name, or none is left.
    """
    urls: list[str] = []
    names: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        url = line.strip()
        if not url or url.startswith("#") or (contains is not None and contains not in url):
            continue
        if urlsplit(url).scheme not in ("http", "https") or not file_name(url):
            raise ValueError(f"{path}:{number}: expected an http(s) URL of a file, got {url!r}")
        if (other := names.setdefault(file_name(url), url)) is not url:
            raise ValueError(f"{path}:{number}: {url} and {other} would be stored under the same name {file_name(url)}")
        urls.append(url)
    if not urls:
        raise ValueError(f"{path}: no URLs" + (f" that contain {contains!r}" if contains is not None else ""))
    return urls


def file_name(url: str) -> str:
    """Last part of the URL's path."""
    name = unquote(urlsplit(url).path.rsplit("/", 1)[-1])
    return "" if name in (".", "..") or "/" in name or "\\" in name else name


def download(
    url: str,
    folder: Path,
    report: Callable[[int, int | None], None] = lambda received, total: None,
    attempts: int = ATTEMPTS,
    timeout_s: float = TIMEOUT_S,
    first_pause_s: float = FIRST_PAUSE_S,
) -> Path:
    """Download one file, unless it is there.

    Args:
        url: http(s).
        folder: where it goes; `<name>.part` holds what has arrived.
        report: called with the bytes received so far and the total, None where the server does not say.
        attempts: tries in a row without a byte received before giving up; the pause between them doubles from
            `first_pause_s`.
        timeout_s: longest silence of the server.

    Raises:
        ConnectionError: all attempts failed; the partial file stays for the next run.
    """
    target = folder / file_name(url)
    if target.exists():
        return target
    part = target.with_name(f"{target.name}.part")
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _fetch(url, part, report, timeout_s)
            part.replace(target)
            return target
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
            permanent = error.code in (400, 401, 403, 404, 410)
            if error.code == 416:  # what has arrived is no prefix of the file
                part.unlink(missing_ok=True)
        except (OSError, http.client.HTTPException) as error:
            reason, permanent = str(error) or type(error).__name__, False
        received = part.stat().st_size if part.exists() else 0
        failures = 1 if received > before else failures + 1
        if permanent or failures >= attempts:
            raise ConnectionError(
                f"{url}: {reason}; gave up after {failures} attempt(s) with {received:,} bytes received. "
                "Run again to continue, or download it by other means and pass the local file"
            )
        time.sleep(first_pause_s * 2 ** (failures - 1))


def _fetch(url: str, part: Path, report: Callable[[int, int | None], None], timeout_s: float) -> None:
    """One attempt, from where `part` ends. The `.etag` beside it keeps two versions of a file from being joined."""
    tag_file = part.with_name(f"{part.name}.etag")
    start = part.stat().st_size if part.exists() and tag_file.exists() else 0
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
        request.add_header("If-Range", tag_file.read_text())
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        resumed = response.status == 206 and (response.headers.get("Content-Range") or "").startswith(f"bytes {start}-")
        start = start if resumed else 0
        if tag := response.headers.get("ETag") or response.headers.get("Last-Modified"):
            tag_file.write_text(tag)
        else:
            tag_file.unlink(missing_ok=True)
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        received = start
        with part.open("ab" if start else "wb") as stream:
            while chunk := response.read(min(CHUNK_BYTES, 1 << 18)):
                stream.write(chunk)
                received += len(chunk)
                report(received, total)
    if total is not None and received != total:
        raise ConnectionError(f"connection closed after {received:,} of {total:,} bytes")
    tag_file.unlink(missing_ok=True)
