"""Runs of `echo-megatron lm-eval`, several in one process or one on torchrun's ranks: FOLDER, NAME=MODEL_ARGS of each.

The model is `echo_megatron`; for a NAME that begins with hf it is the harness's own.
"""

import sys
from pathlib import Path

from echo_megatron.evaluate.lm_eval import main

TASKS = ("tiny_choice", "tiny_rolling", "tiny_until")

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for run in sys.argv[2:]:
        name, _, model_args = run.partition("=")
        arguments = ["--model", "hf" if name.startswith("hf") else "echo_megatron", "--model_args", model_args]
        arguments += ["--include_path", str(folder / "tasks"), "--tasks", ",".join(TASKS), "--device", "cpu"]
        arguments += ["--batch_size", "4", "--output_path", str(folder / name), "--log_samples"]
        if status := main(arguments):
            sys.exit(status)
