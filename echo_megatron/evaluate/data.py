"""Finds what `--data` names, and the tokenizer of a text."""

from __future__ import annotations

import argparse
from pathlib import Path

from omegaconf import OmegaConf

from echo_megatron.cli import config_dir
from echo_megatron.evaluate.models import ModelSource
from echo_megatron.evaluate.token_source import ARRAY_ENDINGS, Tokens, read_source
from echo_megatron.pretrain.schema import DataConfig


def resolve(options: argparse.Namespace, source: ModelSource, vocab_size: int) -> Tokens:
    """The tokens of the command's options.

    Args:
        options: data, split, tokens, tokenizer, id_map.
        source: the model: a run has data of its own, a Hugging Face model a tokenizer.
        vocab_size: of the model.

    Raises:
        ValueError: no data are named, or see `read_source`.
    """
    text, hint = options.data, ""
    if text is None:
        if source.run is None:
            raise ValueError("--data: expected tokens or a text; a Hugging Face model has none of its own")
        text, hint = _of_config(source.run.config.data, options.split, source.text)
    elif not Path(text).exists() and (named := config_dir() / "data" / f"{text}.yaml").is_file():
        merged = OmegaConf.merge(OmegaConf.structured(DataConfig), _without_defaults(named))
        config = OmegaConf.to_object(merged)
        assert isinstance(config, DataConfig)
        text, hint = _of_config(config, options.split, str(named))
    tokenizer = options.tokenizer
    path = Path(text)
    if tokenizer is None and source.run is None and path.is_file() and not path.name.endswith(ARRAY_ENDINGS):
        tokenizer = source.text
    try:
        return read_source(
            text,
            options.tokens,
            vocab_size=vocab_size,
            split=options.split,
            tokenizer=tokenizer,
            id_map=options.id_map,
        )
    except ValueError as error:
        raise ValueError(f"{error}{hint}") from error


def _of_config(config: DataConfig, split: str, where: str) -> tuple[str, str]:
    """The folder or prefix that a data configuration means, and what to say where it is missing."""
    hint = f". To make it: {config.prepare}" if config.prepare else ""
    if config.folder is not None:
        return config.folder, hint
    prefixes = config.train if split == "train" else config.validation
    if len(prefixes) != 1:
        raise ValueError(f"{where}: names {len(prefixes)} {split} datasets, expected one; give --data PREFIX")
    return prefixes[0], hint


def _without_defaults(path: Path) -> dict[str, object]:
    """The file's own options; `defaults` is Hydra's."""
    plain = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items() if name != "defaults"}
