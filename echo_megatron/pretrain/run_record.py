"""`config.yaml` and `run.json` of a run: what was run, on what, and how it ended."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from omegaconf import OmegaConf

from echo_megatron import provenance
from echo_megatron.pretrain.model import num_parameters
from echo_megatron.pretrain.names import communication_name
from echo_megatron.pretrain.preflight import Plan
from echo_megatron.pretrain.run_log import tokens_per_second
from echo_megatron.pretrain.schema import PretrainConfig
from echo_megatron.run_folder import RunFolder, write_atomic


class RunRecord:
    """Writes config.yaml and run.json of one run; on rank 0 only."""

    def __init__(self, config: PretrainConfig, plan: Plan, device: torch.device, command: str):
        self.folder = RunFolder(config.run_dir)
        self._config = config
        trainer = config.trainer
        self._run: dict[str, Any] = {
            "name": config.name,
            "tp_comm": communication_name(config),
            "seed": config.seed,
            "data": asdict(plan.data),
            "global_batch_size": trainer.global_batch_size,
            "sequence_length": config.model.sequence_length,
            "tensor_parallel": trainer.tensor_parallel,
            "pipeline_parallel": trainer.pipeline_parallel,
            "data_parallel": trainer.data_parallel,
            "layers": plan.layers.name,
            "precision": str(plan.dtype).removeprefix("torch."),
            "model": config.model.name,
            "parameters": num_parameters(config.model, config.data.padded_vocab_size),
            "lr": config.optim.lr,
            "max_steps": trainer.max_steps,
            "machine": provenance.machine(device),
            "versions": provenance.versions("echo-megatron", "torch", "megatron-core", "transformer-engine"),
            "commit": provenance.commit(),
            "command": command,
        }

    def start(self, first_step: int, communication: str) -> str:
        """Write both files with status "running"; returns what to print."""
        text = OmegaConf.to_yaml(OmegaConf.structured(self._config), resolve=True)
        self.folder.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder.path / "config.yaml", text)
        self._write("running", None)
        run = self._run
        lines = [
            f"{self.folder.path}: {run['parameters']:,} parameters, {run['tp_comm']}, {run['precision']}, "
            f"{run['layers']} layers, "
            f"TP={run['tensor_parallel']} PP={run['pipeline_parallel']} DP={run['data_parallel']}, "
            f"{run['data']['name']} ({run['data']['tokens']:,} tokens)"
        ]
        tokens = run["max_steps"] * run["global_batch_size"] * run["sequence_length"]
        if tokens > run["data"]["tokens"]:
            lines.append(f"the run reads its data {tokens / run['data']['tokens']:.1f} times")
        if first_step > 1:
            lines.append(f"resuming after step {first_step - 1}")
        return "\n".join((*lines, *filter(None, (communication,))))

    def end(self, status: str, reason: str | None) -> str:
        """Write the final status; returns what to print."""
        self._write(status, reason)
        hint = "" if status == "finished" else "; the same command goes on from the last checkpoint"
        return f"{self.folder.path}: {status}{f' ({reason})' if reason else ''}{hint}"

    def _write(self, status: str, reason: str | None) -> None:
        records = self.folder.train()
        tp_bytes = [record["tp_bytes"] for record in records if record.get("tp_bytes") is not None]
        tokens = self._run["global_batch_size"] * self._run["sequence_length"]
        self.folder.write_run(
            {
                **self._run,
                "status": status,
                "reason": reason,
                "tp_bytes_per_step": sorted(tp_bytes)[len(tp_bytes) // 2] if tp_bytes else None,
                "tokens_per_s": tokens_per_second(records, tokens),
            }
        )
