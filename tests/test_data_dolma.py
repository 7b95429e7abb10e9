"""Dolma shards and token arrays to Megatron's indexed dataset: content, determinism, interruption, damage."""

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer

from echo_megatron.data import PreparedData
from echo_megatron.data.download import download, read_url_list
from echo_megatron.data.files import exclusive_lock
from echo_megatron.data.prepare_cli import main
from echo_megatron.data.sample import train_tokenizer
from echo_megatron.data.shards import ShardCounts, _lines, is_validation
from echo_megatron.data.tokens import TokenOptions, pack_tokens, read_tokens

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "scripts" / "prepare_dolma_c4.py"
WORDS = [
    "the",
    "state",
    "of",
    "our",
    "union",
    "is",
    "strong",
    "café",
    "中文",
    "naïve",
    "🙂",
    "<|endoftext|>",
    "government",
    "congress",
]


def text(shard: int, line: int, words: int = 12) -> str:
    rng = np.random.default_rng([shard, line])
    return " ".join(rng.choice(WORDS, words))


def write_shard(folder: Path, shard: int, lines: int, words: int = 12) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"c4-{shard:04d}.json.gz"
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as stream:
        for line in range(lines):
            value = {"id": f"c4/{shard}/{line}", "text": text(shard, line, words), "source": "c4", "metadata": {}}
            stream.write(json.dumps(value, ensure_ascii=line % 2 == 0) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([text(0, line, 50) for line in range(50)], 320).save(str(path))
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    return [write_shard(folder, shard, lines) for shard, lines in enumerate((40, 1, 60))]


def prepare(shards: list[Path], out: Path, tokenizer: Path, *options: str) -> int:
    return main(
        [*map(str, shards), "--out", str(out), "--tokenizer", str(tokenizer), "--validation-every", "10", *options]
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def modification_times(parts: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in parts.glob("0*/part.json")}


def documents(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[index].tolist() for index in range(len(dataset))]


# --- shards: the result ---


def test_every_document_once_in_order_and_ended(shards, tokenizer, tmp_path):
    assert prepare(shards, tmp_path / "out", tokenizer) == 0
    data = PreparedData.load(tmp_path / "out", verify_checksums=True)
    loaded = Tokenizer.from_file(str(data.tokenizer))
    wanted: dict[bool, list[str]] = {False: [], True: []}
    for shard, lines in enumerate((40, 1, 60)):
        for line in range(lines):
            wanted[is_validation(f"c4/{shard}/{line}", 10)].append(text(shard, line))
    assert wanted[True]
    for prefix, texts in ((data.train, wanted[False]), (data.validation, wanted[True])):
        found = documents(prefix)
        assert [loaded.decode(ids[:-1], skip_special_tokens=False) for ids in found] == texts
        # "<|endoftext|>" written in a text is text: the id appears at the end only.
        assert all(ids[-1] == data.eod and data.eod not in ids[:-1] for ids in found)
    manifest = json.loads((data.folder / "manifest.json").read_text())
    assert manifest["counts"]["documents"] == 101
    assert manifest["counts"]["tokens"] == data.train_tokens + data.validation_tokens
    assert [shard["documents"] for shard in manifest["shards"]] == [40, 1, 60]
    assert not (data.folder / "parts").exists()
    assert prepare(shards, tmp_path / "out", tokenizer) == 0  # nothing left to do


def test_workers_do_not_show_in_the_result(shards, tokenizer, tmp_path):
    for workers in ("1", "2"):
        assert prepare(shards, tmp_path / workers, tokenizer, "--workers", workers) == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_killed_run_continues_to_the_same_bytes(tokenizer, tmp_path):
    shards = [write_shard(tmp_path / "in", shard, 20) for shard in range(3)]
    shards.append(write_shard(tmp_path / "in", 3, 6_000, words=40))  # long enough to be killed in
    command = [
        *(sys.executable, str(SCRIPT), *map(str, shards)),
        *("--tokenizer", str(tokenizer), "--validation-every", "10", "--workers", "2"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([*command, "--out", str(tmp_path / "killed")], env=environment, stderr=subprocess.PIPE)
    parts = tmp_path / "killed" / "parts"
    deadline = time.monotonic() + 60
    while len(list(parts.glob("0000[0-2]-*"))) < 3 or not list(parts.glob(".tmp-00003-*")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert not (parts / f"00003-{shards[3].name}").exists()
    assert not (tmp_path / "killed" / "manifest.json").exists()
    process.communicate(timeout=30)  # the workers share this pipe and end with their parent
    finished = modification_times(parts)
    resumed = subprocess.run(
        [*command, "--out", str(tmp_path / "killed"), "--keep-parts"], env=environment, capture_output=True, timeout=120
    )
    assert resumed.returncode == 0, resumed.stderr
    assert b"continuing: 3 of 4 shards are done" in resumed.stderr
    assert len(finished) == 3
    assert finished.items() <= modification_times(parts).items()
    assert prepare(shards, tmp_path / "whole", tokenizer) == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_other_options_are_refused(shards, tokenizer, tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare(shards, out, tokenizer) == 0
    before = contents(out)
    assert main([*map(str, shards[:2]), "--out", str(out), "--tokenizer", str(tokenizer)]) == 1
    message = capsys.readouterr().err
    assert "shards: 3 files" in message
    assert "validation_every: 10 then, 1000 now" in message
    assert "eod" not in message
    assert contents(out) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    assert prepare(shards, tmp_path / "full", tokenizer) == 1
    assert "not empty" in capsys.readouterr().err


def test_one_writer_at_a_time(shards, tokenizer, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    with exclusive_lock(tmp_path / "out" / ".lock", "testing"):
        assert prepare(shards, tmp_path / "out", tokenizer) == 1
        assert "another process is preparing data" in " ".join(capsys.readouterr().err.split())
    assert prepare(shards, tmp_path / "out", tokenizer) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no shards"),
        (["absent.json.gz"], "absent.json.gz: no such file"),
        (["absent-*.json.gz"], "matches no file"),
        (["SHARD", "SHARD"], "given twice"),
        (["SHARD", "--workers", "0"], "workers: expected at least 1, got 0"),
        (["SHARD", "--vocab-size", "10"], "--vocab-size: not used with shards"),
        (["SHARD", "--tokens", "a.u16"], "shards: not used with --tokens"),
        (["SHARD", "--url-contains", "c4"], "need --urls"),
        (["SHARD", "--eod-token", "</s>"], "no token '</s>'"),
        (["SHARD", "--tokenizer", "./absent"], "no such tokenizer"),
        (["SHARD", "--tokenizer", "SHARD"], "not a Hugging Face tokenizer.json"),
    ],
)
def test_wrong_options_fail_at_once(shards, tokenizer, tmp_path, capsys, arguments, message):
    arguments = [str(shards[0]) if argument == "SHARD" else argument for argument in arguments]
    if "--tokenizer" not in arguments and "--tokens" not in arguments:
        arguments += ["--tokenizer", str(tokenizer)]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_unreachable_hub_says_to_pass_a_path(shards, tmp_path, capsys, monkeypatch):
    import huggingface_hub

    def fail(*args, **kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    assert main([str(shards[0]), "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert "Qwen/Qwen3-0.6B" in message
    assert "pass the path of a tokenizer.json" in message


# --- shards: damage ---

BAD_LINES = {
    b"{not json": "not JSON",
    b"[1, 2]": "expected a JSON object, got list",
    b'{"id": "a"}': 'no "text"',
    b'{"id": "a", "text": 5}': '"text" is int, expected a string',
    b'{"id": "a", "text": null}': '"text" is NoneType',
    b'{"id": "a", "text": "\xff\xfe"}': "invalid UTF-8 at byte 21",
    b'{"id": "a", "text": "\\ud800"}': '"text" has half of a surrogate pair',
    b"[" * 200_000: "JSON nested too deeply",
    b"": "not JSON",
}


def test_bad_lines_are_placed_and_counted(tokenizer, tmp_path, capsys):
    path = tmp_path / "bad.json.gz"
    good = b'{"text": "no id", "n": 1}'
    with gzip.open(path, "wb") as stream:
        for line in BAD_LINES:
            stream.write(line + b"\n" + good + b"\n")
        stream.write(b'{"id": "e", "text": " \\n"}\n{"id": "last", "text": "without a line end"}')
    options = ("--max-bad-lines", str(len(BAD_LINES)))
    assert prepare([path], tmp_path / "out", tokenizer, *options) == 0
    output = " ".join(capsys.readouterr().err.split())
    for number, reason in enumerate(BAD_LINES.values()):
        assert f"bad.json.gz:{2 * number + 1}: {reason}" in output
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text())["counts"]
    assert counts["bad_lines"] == len(BAD_LINES)
    assert counts["documents"] == len(BAD_LINES) + 1
    assert counts["empty_documents"] == 1
    assert counts["lines"] == 2 * len(BAD_LINES) + 2

    assert prepare([path], tmp_path / "strict", tokenizer, "--max-bad-lines", str(len(BAD_LINES) - 1)) == 1
    assert "bad lines" in capsys.readouterr().err
    assert not (tmp_path / "strict" / "manifest.json").exists()
    assert prepare([path], tmp_path / "strict", tokenizer, *options) == 0  # the limit is not part of the result


def test_bad_lines_of_several_shards_add_up(tokenizer, tmp_path, capsys):
    paths = [tmp_path / f"{name}.json.gz" for name in "ab"]
    for path in paths:
        path.write_bytes(gzip.compress(b'bad\n{"text": "good"}\n'))
    assert prepare(paths, tmp_path / "out", tokenizer, "--max-bad-lines", "1") == 1
    assert "2 bad lines, at most 1" in " ".join(capsys.readouterr().err.split())


def damage(content: bytes, how: str) -> bytes:
    half = len(content) // 2
    return {
        "truncated": content[:half],
        "flipped": content[:half] + bytes([content[half] ^ 0xFF, content[half + 1] ^ 0xFF]) + content[half + 2 :],
        "checksum": content[:-8] + bytes([content[-8] ^ 1]) + content[-7:],
        "plain": b'{"id": "a", "text": "not compressed"}\n',
        "empty": b"",
    }[how]


@pytest.mark.parametrize("how", ["truncated", "flipped", "checksum", "plain", "empty"])
def test_corrupt_shard_is_told_and_kept_only_when_allowed(tokenizer, tmp_path, capsys, how):
    good, bad = write_shard(tmp_path, 0, 20), write_shard(tmp_path, 1, 2000)
    whole = bad.read_bytes()
    bad.write_bytes(damage(whole, how))
    limit = ("--max-bad-lines", "2000")  # flipped bytes also spoil lines
    assert prepare([good, bad], tmp_path / "out", tokenizer, *limit) == 1
    output = " ".join(capsys.readouterr().err.split())
    assert "corrupt shard: c4-0001.json.gz:" in output
    assert "1 of 2 shards are corrupt" in output
    assert not (tmp_path / "out" / "manifest.json").exists()

    assert prepare([good, bad], tmp_path / "allowed", tokenizer, "--allow-corrupt", *limit) == 0
    manifest = json.loads((tmp_path / "allowed" / "manifest.json").read_text())
    shard = manifest["shards"][1]
    assert manifest["counts"]["corrupt_shards"] == 1
    assert shard["truncated"] is (how in ("truncated", "empty"))
    assert shard["corrupt"].startswith(f"c4-0001.json.gz:{shard['lines'] + 1}:")
    assert shard["documents"] == shard["lines"] - shard["bad_lines"]
    if how in ("truncated", "checksum"):
        assert shard["documents"] > 500
    # The file is replaced by a good one: only it is read again.
    bad.write_bytes(whole)
    assert prepare([good, bad], tmp_path / "out", tokenizer) == 0
    assert "continuing: 1 of 2 shards are done" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["counts"]["documents"] == 2020


def test_endless_line_is_skipped_in_pieces():
    import io

    from echo_megatron.data.shards import _CountedFile

    counts = ShardCounts("a.json.gz")
    source = _CountedFile(io.BytesIO(gzip.compress(b"one\n" + b"x" * 1000 + b"\ntwo\n" + b"y" * 30)))
    assert list(_lines(source, counts, max_line_bytes=16)) == [b"one\n", b"two\n"]
    assert counts.lines == 4
    assert [place.split(":")[1] for place in counts.bad_line_places] == ["2", "4"]


# --- downloads ---


class Server(BaseHTTPRequestHandler):
    """Serves ranges of `content`, and closes the connection after `cut` bytes of each answer."""

    content = bytes(range(256)) * 400
    cut: int | None = None
    etag = '"one"'
    ranges: list[str | None] = []  # noqa: RUF012  # reset for each test

    def do_GET(self) -> None:
        if self.path.startswith("/missing"):
            self.send_error(404)
            return
        wanted = self.headers.get("Range")
        type(self).ranges.append(wanted)
        start = int(wanted.split("=")[1].rstrip("-")) if wanted and self.headers.get("If-Range") == self.etag else 0
        body = self.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", self.etag)
        self.end_headers()
        self.wfile.write(body[: self.cut])

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[str]:
    monkeypatch.setattr(Server, "ranges", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_download_resumes_where_it_was_cut(server, tmp_path, monkeypatch):
    monkeypatch.setattr(Server, "cut", 30_000)
    seen: list[int] = []
    path = download(
        f"{server}/c4/c4-0000.json.gz?x=1", tmp_path, lambda got, total: seen.append(got), first_pause_s=0.01
    )
    assert path == tmp_path / "c4-0000.json.gz"
    assert path.read_bytes() == Server.content
    assert Server.ranges == [None, "bytes=30000-", "bytes=60000-", "bytes=90000-"]
    assert seen[-1] == len(Server.content)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    download(f"{server}/c4/c4-0000.json.gz", tmp_path)
    assert len(Server.ranges) == 4  # it is there


def test_download_does_not_join_two_versions(server, tmp_path):
    (tmp_path / "a.gz.part").write_bytes(b"old version")
    (tmp_path / "a.gz.part.etag").write_text('"zero"')
    assert download(f"{server}/a.gz", tmp_path).read_bytes() == Server.content


def test_download_gives_up(server, tmp_path, monkeypatch):
    with pytest.raises(ConnectionError, match="HTTP 404"):
        download(f"{server}/missing.gz", tmp_path)
    monkeypatch.setattr(Server, "cut", 0)
    with pytest.raises(ConnectionError, match="gave up after 3 attempt"):
        download(f"{server}/a.gz", tmp_path, attempts=3, first_pause_s=0.01)
    assert len(Server.ranges) == 3


def test_url_list(server, tokenizer, tmp_path, monkeypatch, capsys):
    listed = tmp_path / "urls.txt"
    listed.write_text(f"# v1_6\n{server}/books/books-0000.json.gz\n\n{server}/c4/c4-0000.json.gz\n")
    assert read_url_list(listed, "/c4/") == [f"{server}/c4/c4-0000.json.gz"]
    monkeypatch.setattr(Server, "content", write_shard(tmp_path / "served", 0, 30).read_bytes())
    arguments = ["--urls", str(listed), "--url-contains", "/c4/", "--tokenizer", str(tokenizer)]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert PreparedData.load(tmp_path / "out").train_tokens > 0
    for line, message in (
        (f"{server}/other/books-0000.json.gz", "same name"),
        ("file:///etc/passwd", "expected an http"),
        ("../up.gz", "expected an http"),
    ):
        listed.write_text(f"{server}/books/books-0000.json.gz\n{line}\n")
        with pytest.raises(ValueError, match=message):
            read_url_list(listed)


# --- ready token arrays ---


def write_tokens(path: Path, ids: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, ids)
    else:
        raw = ids.astype("<u2" if ".u16" in path.name else "<u4").tobytes()
        path.write_bytes(lzma.compress(raw) if path.suffix == ".xz" else raw)
    return path


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=200),
    suffix=st.sampled_from([".u16", ".u32", ".u16.xz", ".u32.xz", ".npy"]),
    chunk=st.integers(1, 50),
    mapped=st.booleans(),
)
def test_packed_tokens_are_the_stream_cut_at_eod(ids, suffix, chunk, mapped):
    eod, vocab_size = 3, 70_000
    id_map = np.array([60_000, 1, 2, 5, 4, eod, 6, 7, 8, 69_999]) if mapped else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_tokens(folder / f"tokens{suffix}", np.array(ids))
        is_mapped = mapped and ".u16" in suffix
        real = [int(id_map[rank]) for rank in ids] if is_mapped else ids
        assert np.concatenate(list(read_tokens(path, id_map, chunk))).tolist() == real
        wanted: list[list[int]] = [[]]
        for token in real:
            wanted[-1].append(token)
            if token == eod:
                wanted.append([])
        added = int(bool(wanted[-1]))
        wanted = [[*ids, eod] if ids[-1] != eod else ids for ids in wanted if ids]
        empty = sum(ids == [eod] for ids in wanted)
        wanted = [ids for ids in wanted if ids != [eod]]
        map_path = None
        if id_map is not None:
            map_path = folder / "map.npy"
            np.save(map_path, id_map)
        options = TokenOptions([path], folder / "out", id_map=map_path, eod=eod, vocab_size=vocab_size)
        if not wanted:
            with pytest.raises(ValueError, match="no documents"):
                pack_tokens(options, Console(quiet=True))
            return
        data = pack_tokens(options, Console(quiet=True))
        assert documents(data.train) == wanted
        counts = json.loads((data.folder / "manifest.json").read_text())["counts"]["train"]
        assert (counts["empty_documents"], counts["eods_added"]) == (empty, added)


def test_tokens_from_the_command_line(tokenizer, tmp_path, capsys):
    train = write_tokens(tmp_path / "train.u16.xz", np.tile([1, 2, 3, 0, 7, 0], 500))
    validation = write_tokens(tmp_path / "validation.u32.xz", np.array([9, 9, 9, 0]))
    arguments = [
        *("--tokens", str(train), "--validation-tokens", str(validation), "--eod", "0", "--vocab-size", "320"),
        *("--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")),
    ]
    assert main(arguments) == 0
    data = PreparedData.load(tmp_path / "out", verify_checksums=True)
    assert documents(data.train) == [[1, 2, 3, 0], [7, 0]] * 500
    assert documents(data.validation) == [[9, 9, 9, 0]]
    before = (tmp_path / "out" / "train.bin").stat().st_mtime_ns
    assert main(arguments) == 0
    assert (tmp_path / "out" / "train.bin").stat().st_mtime_ns == before
    assert main([*arguments[:-2], "--out", str(tmp_path / "out"), "--eod", "7"]) == 1
    assert "other files or options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.u16", b"123", "3 bytes are no whole number of 2-byte ids"),
        ("a.u32.xz", lzma.compress(bytes(400_000))[:-30], "truncated or damaged .xz"),
        ("a.u16.xz", b"not xz", "truncated or damaged .xz"),
        ("a.npy", b"not npy", "not a readable .npy"),
        ("a.txt", b"1 2 3", "expected a name ending in"),
        ("a.u16", np.array([1, 2, 99, 0], "<u2").tobytes(), "rank 99 at token 2, the id map has 4"),
        ("a.u32", np.array([1, 500, 0], "<u4").tobytes(), "token ids 0 to 500, expected 0 to 319"),
    ],
)
def test_damaged_token_files_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "map.npy", np.arange(4))
    options = TokenOptions([tmp_path / name], tmp_path / "out", id_map=tmp_path / "map.npy", eod=0, vocab_size=320)
    with pytest.raises(ValueError, match=message) as error:
        pack_tokens(options, Console(quiet=True))
    assert name in str(error.value) or "train" in str(error.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_npy_must_be_one_row_of_integers(tmp_path):
    for ids in (np.zeros((2, 2), int), np.zeros(3), np.array([{}], dtype=object)):
        np.save(tmp_path / "a.npy", ids)
        with pytest.raises(ValueError, match=r"a\.npy"):
            list(read_tokens(tmp_path / "a.npy"))
