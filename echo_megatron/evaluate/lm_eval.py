"""`echo-megatron lm-eval …`: lm-evaluation-harness's own command, which then knows the model `echo_megatron`.

The harness finds models by its registry alone, so the class is registered here and its command is called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

MISSING = (
    "lm-evaluation-harness is not installed. Expected lm-eval 0.4.13 or newer of 0.4 with its extra hf: "
    "pip install 'echo-megatron[eval]' (in a checkout: make eval-env)"
)


def main(arguments: Sequence[str], prog: str = "echo-megatron lm-eval") -> int:
    """Entry point: the harness's arguments; returns the exit status.

    Under torchrun (`torchrun --nproc-per-node 2 -m echo_megatron.evaluate.lm_eval …`) the processes are tensor-parallel
    ranks.
    """
    if find_spec("lm_eval") is None or find_spec("accelerate") is None:
        print(f"error: {MISSING}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") != "0":
        os.environ["TQDM_DISABLE"] = "1"  # one progress bar, read when tqdm is imported
    from lm_eval.__main__ import cli_evaluate

    from echo_megatron.evaluate.lm_eval_model import close_models

    previous, sys.argv = sys.argv, [prog, *arguments]
    error: BaseException | None = None
    try:
        cli_evaluate()
    except ValueError as caught:
        error = caught
        print(f"error: {caught}", file=sys.stderr)
        return 2
    except BaseException as caught:
        error = caught
        raise
    finally:
        sys.argv = previous
        close_models(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "echo_megatron.evaluate.lm_eval"))
