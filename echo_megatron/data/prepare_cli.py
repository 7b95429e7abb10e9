"""Command line of `scripts/prepare_dolma_c4.py`: options, patterns, downloads, exit status."""

import argparse
import glob
from pathlib import Path

from rich.console import Console

from echo_megatron.data.dolma import DolmaOptions, prepare_dolma
from echo_megatron.data.download import download, file_name, read_url_list
from echo_megatron.data.manifest import PreparedData
from echo_megatron.data.progress import count_progress
from echo_megatron.data.tokens import QWEN3_EOD, QWEN3_VOCABULARY, TokenOptions, pack_tokens

EPILOG = """Exit status: 0 prepared; 1 wrong option, unreadable data beyond the limits, or no network; 130 interrupted.
An interrupted run continues when it is started again with the same options."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prepare_dolma_c4.py", description=__doc__, epilog=EPILOG)
    parser.add_argument("shards", nargs="*", help="*.json.gz shards, or quoted patterns, in the order wanted")
    parser.add_argument("--out", type=Path, required=True, help="folder to fill")
    parser.add_argument(
        "--tokenizer", help="tokenizer.json, a folder with one, or a hub name (shards: Qwen/Qwen3-0.6B)"
    )
    parser.add_argument(
        "--validation-every", type=int, help="1 document in N to validation (shards: 1000; tokens: 0, none)"
    )
    dolma = parser.add_argument_group("Dolma shards")
    dolma.add_argument("--urls", type=Path, help="file with one URL a line to download first")
    dolma.add_argument("--url-contains", help="use only URLs with this in them, such as /c4/")
    dolma.add_argument("--download-dir", type=Path, help="where downloads are kept (default: OUT.download)")
    dolma.add_argument("--workers", type=int, help="processes (default 1)")
    dolma.add_argument("--eod-token", help="token appended to each document (default <|endoftext|>)")
    dolma.add_argument("--max-bad-lines", type=int, help="fail beyond so many unreadable lines (default 100)")
    dolma.add_argument("--allow-corrupt", action="store_true", help="keep what could be read of broken gzip files")
    dolma.add_argument("--keep-parts", action="store_true", help="keep the folder of single shards after joining")
    tokens = parser.add_argument_group("ready token arrays")
    tokens.add_argument("--tokens", type=Path, nargs="+", help="training ids: .u16 .u32 .u16.xz .u32.xz .npy")
    tokens.add_argument("--validation-tokens", type=Path, nargs="+", help="validation ids in the same formats")
    tokens.add_argument("--id-map", type=Path, help=".npy of ids by rank, applied to 16-bit files")
    tokens.add_argument("--eod", type=int, help=f"id that ends a document (default {QWEN3_EOD})")
    tokens.add_argument("--vocab-size", type=int, help=f"number of ids (default {QWEN3_VOCABULARY})")
    return parser


DOLMA_ONLY = (
    *("shards", "urls", "url_contains", "download_dir", "workers"),
    *("eod_token", "max_bad_lines", "allow_corrupt", "keep_parts"),
)
TOKENS_ONLY = ("validation_tokens", "id_map", "eod", "vocab_size")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    console = Console(stderr=True)
    args = build_parser().parse_args(arguments)
    try:
        _refuse_mixed(args)
        prepared = _tokens(args, console) if args.tokens else _dolma(args, console)
    except KeyboardInterrupt:
        console.print("interrupted; start it again with the same options to continue", style="yellow")
        return 130
    except (ValueError, OSError, RuntimeError) as error:  # TimeoutError and ConnectionError are OSErrors
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return 1
    console.print(
        f"{prepared.folder}: {prepared.train_tokens:,} training tokens, {prepared.validation_tokens:,} "
        f"validation tokens, "
        f"fingerprint {prepared.fingerprint[:16]}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _refuse_mixed(args: argparse.Namespace) -> None:
    """An option of the other kind of input would do nothing."""
    kind, others = ("--tokens", DOLMA_ONLY) if args.tokens else ("shards", TOKENS_ONLY)
    if given := [name for name in others if getattr(args, name) not in (None, [], False)]:
        names = ", ".join(name if name == "shards" else "--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{names}: not used with {kind}; see --help for which options belong together")
    if (args.url_contains or args.download_dir) and not args.urls:
        raise ValueError("--url-contains and --download-dir need --urls")


def _given(args: argparse.Namespace, **names: str) -> dict[str, object]:
    """Options that were given, under the names of the options class; the others keep its defaults."""
    return {field: getattr(args, name) for field, name in names.items() if getattr(args, name) is not None}


def _dolma(args: argparse.Namespace, console: Console) -> PreparedData:
    shards = [path for pattern in args.shards for path in _expand(pattern)]
    if args.urls:
        shards += _download(args, console)
    given = _given(
        args,
        tokenizer="tokenizer",
        eod="eod_token",
        validation_every="validation_every",
        workers="workers",
        max_bad_lines="max_bad_lines",
        allow_corrupt="allow_corrupt",
        keep_parts="keep_parts",
    )
    return prepare_dolma(DolmaOptions(shards, args.out, **given), console)  # type: ignore[arg-type]


def _expand(pattern: str) -> list[Path]:
    if not glob.has_magic(pattern):
        return [Path(pattern)]
    paths = sorted(glob.glob(pattern))  # noqa: PTH207  # Path.glob takes no absolute patterns
    if not paths:
        raise ValueError(f"{pattern}: matches no file")
    return [Path(path) for path in paths]


def _download(args: argparse.Namespace, console: Console) -> list[Path]:
    urls = read_url_list(args.urls, args.url_contains)
    folder = args.download_dir or args.out.with_name(args.out.name + ".download")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with count_progress(console) as bar:
        row = bar.add_task("", total=len(urls))
        for url in urls:

            def report(received: int, total: int | None, name: str = file_name(url)) -> None:
                of = f" of {total / 1e6:,.0f}" if total else ""
                bar.update(row, description=f"{name} {received / 1e6:,.0f}{of} MB")

            paths.append(download(url, folder, report))
            bar.advance(row)
    return paths


def _tokens(args: argparse.Namespace, console: Console) -> PreparedData:
    given = _given(
        args,
        validation="validation_tokens",
        id_map="id_map",
        eod="eod",
        vocab_size="vocab_size",
        tokenizer="tokenizer",
        validation_every="validation_every",
    )
    return pack_tokens(TokenOptions(args.tokens, args.out, **given), console)  # type: ignore[arg-type]
