"""Starts torchrun for a run and passes a stop on to it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from omegaconf import OmegaConf

from echo_megatron.pretrain.checkpoint_folder import CheckpointFolder
from echo_megatron.pretrain.quiet import quieten_libraries
from echo_megatron.pretrain.schema import PretrainConfig
from echo_megatron.pretrain.stop import STOP_FILE


def launch(config: PretrainConfig) -> int:
    """Train in as many processes as the parallel sizes ask for, on this machine.

    SIGTERM or SIGINT lets the step finish, saves a checkpoint and returns 0; a second one ends the processes at once.

    Returns:
        torchrun's exit status; 0: finished, or stopped with a checkpoint.

    Raises:
        ValueError, OSError: see `preflight`.
    """
    quieten_libraries()
    logging.getLogger("echo_megatron").setLevel(logging.ERROR)  # rank 0 checks again, and says what is worth a remark
    from echo_megatron.pretrain.preflight import preflight

    device = preflight(config).device
    if CheckpointFolder(config.run_dir / "checkpoints", 1).latest() == config.trainer.max_steps:
        print(f"{config.run_dir}: finished already, after step {config.trainer.max_steps}")
        return 0
    (config.run_dir / STOP_FILE).unlink(missing_ok=True)
    processes = config.trainer.world_size
    with tempfile.TemporaryDirectory(prefix="echo-megatron-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
            *("-m", "echo_megatron.pretrain.worker", "--config", str(file)),
            *("--command", " ".join(sys.argv), "--launcher-pid", str(os.getpid())),
        ]
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
        if device.type == "cpu":
            # glibc maps and unmaps tensors of this size at every use; kept, they cost no page faults: 2x in quantizing.
            environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
            environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(4 << 30))
        # A session of its own: Ctrl-C in the terminal reaches this process alone, which asks the others to stop.
        return _wait(subprocess.Popen(command, env=environment, start_new_session=True), config.run_dir)


def _wait(process: subprocess.Popen[bytes], run_dir: Path) -> int:
    requests = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal requests
        requests += 1
        if requests == 1:
            print("stopping after this step, with a checkpoint; once more to end at once", file=sys.stderr, flush=True)
            (run_dir / STOP_FILE).touch()
        else:
            process.terminate()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
