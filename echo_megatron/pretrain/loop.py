"""The training loop: Megatron's schedule, optimizer and scheduler, step by step, from a validated configuration."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from echo_megatron.diagnostics import Inspector, gather
from echo_megatron.pretrain import checkpoint
from echo_megatron.pretrain.checkpoint import TrainingState
from echo_megatron.pretrain.checkpoint_folder import CheckpointFolder
from echo_megatron.pretrain.dataset import Batch, BatchSource
from echo_megatron.pretrain.distributed import any_rank, end_process
from echo_megatron.pretrain.model import build_model
from echo_megatron.pretrain.optimizer import build_optimizer, step_if_finite
from echo_megatron.pretrain.preflight import Plan
from echo_megatron.pretrain.run_log import RunLog, StepResult
from echo_megatron.pretrain.run_record import RunRecord
from echo_megatron.pretrain.schema import PretrainConfig
from echo_megatron.pretrain.stop import StopRequest
from echo_megatron.pretrain.traffic import TrafficMeter
from echo_megatron.transports.failure_watch import watch

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """Loss or gradients were not finite for too many steps in a row."""


class Trainer:
    """One process's part of a run: builds everything, resumes where there is a checkpoint, and trains.

    Args:
        config: the run.
        plan: from `preflight`.
        device: of this process, from `distributed`.
        stop: asked after each step.
        command: what the user typed, for run.json.
    """

    def __init__(self, config: PretrainConfig, plan: Plan, device: torch.device, stop: StopRequest, command: str):
        self.config = config
        self._device = device
        self._stop = stop
        self._settings = plan.settings
        self._checkpoints = CheckpointFolder(config.run_dir / "checkpoints", config.trainer.keep_checkpoints)
        self._record = RunRecord(config, plan, device, command) if dist.get_rank() == 0 else None
        self._batches = BatchSource(config, device)
        chunks = build_model(config, plan.dtype, plan.layers, device)
        self._installation = _install(chunks, config)
        every = config.trainer.inspect_every
        self._inspector = Inspector(self._installation, every) if every and self._installation else None
        optimizer, scheduler = build_optimizer(config.optim, config.trainer.max_steps, chunks, plan.dtype)
        self._state = TrainingState(chunks[0], optimizer, scheduler)
        self._forward_backward = get_forward_backward_func()
        self._meter = TrafficMeter(parallel_state.get_tensor_model_parallel_group())
        self._num_nonfinite = 0

    def run(self) -> str:
        """Train to the last step or until asked to stop, with a checkpoint at the end.

        Returns:
            "finished" or "stopped".

        Raises:
            NonFiniteError: see `trainer.max_nonfinite_steps`; the last checkpoint stays.
        """
        first_step = self._resume() + 1
        trainer = self.config.trainer
        if self._record is None:
            with watch.ending(self._end_blocked):
                return self._train(first_step, None)
        with RunLog(
            self._record.folder, first_step, trainer.max_steps, self._tokens_per_step, trainer.log_interval
        ) as log:
            log.say(self._record.start(first_step, self._installation.report() if self._installation else ""))
            try:
                with watch.ending(self._end_blocked):
                    status = self._train(first_step, log)
            except BaseException as error:
                self._record.end("stopped", f"{type(error).__name__}: {error}")
                raise
            log.say(self._record.end(status, self._stop.reason() if status == "stopped" else None))
            self._stop.clear()
            return status

    def _end_blocked(self, failure: str) -> NoReturn:
        """A rank is gone, and this one's main thread is in a wait for it that has no end of its own."""
        try:
            if self._record is not None:
                self._record.end("stopped", f"CommunicationError: {failure}")
        finally:
            end_process()

    def close(self) -> None:
        """Gives Echo's memory back; collective. For processes that go on after the run."""
        if self._installation is not None:
            self._installation.uninstall()

    @property
    def _tokens_per_step(self) -> int:
        return self.config.trainer.global_batch_size * self.config.model.sequence_length

    def _resume(self) -> int:
        """Restore the newest checkpoint; returns its step, or 0."""
        step = self._checkpoints.latest() or 0
        if step:
            checkpoint.load(self._checkpoints, step, self._state)
        if self._record is not None:
            self._record.folder.truncate(step)
        return step

    def _train(self, first_step: int, log: RunLog | None) -> str:
        trainer = self.config.trainer
        for step in range(first_step, trainer.max_steps + 1):
            is_measured = self._inspector is not None and self._inspector.begin_step(step)
            result = self._train_step(step)
            metrics = self._end_inspection() if is_measured else {}
            if log is not None:
                log.step(result)
                log.inspection(step, metrics)
            self._count_nonfinite(result)
            is_last = step == trainer.max_steps
            if is_last or _is_due(step, trainer.val_interval):
                loss = self._validate()
                if log is not None:
                    log.validation(step, loss)
            stopping = any_rank(self._stop.reason() is not None, self._device)
            if is_last or stopping or _is_due(step, trainer.save_interval):
                checkpoint.save(self._checkpoints, step, self._state, self._settings)
            if stopping and not is_last:
                return "stopped"
        return "finished"

    def _train_step(self, step: int) -> StepResult:
        start = time.perf_counter()
        state = self._state
        state.chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        state.chunk.train()
        with self._meter:
            loss = self._pass(self._batches.train(step), forward_only=False)
            grad_norm = step_if_finite(state.optimizer) if math.isfinite(loss) else None
            tp_bytes = self._take_tp_bytes()
        # Megatron's scheduler holds the rate of the coming update; the one just made is what belongs in the log.
        lr = state.optimizer.param_groups[0]["lr"]
        state.scheduler.step(1)
        seconds = time.perf_counter() - start
        return StepResult(
            step,
            loss,
            float(lr),
            math.nan if grad_norm is None else grad_norm,
            step * self._tokens_per_step,
            seconds,
            tp_bytes,
        )

    def _end_inspection(self) -> dict[str, float]:
        """What was measured in the step, of all pipeline stages."""
        assert self._inspector is not None
        group = parallel_state.get_pipeline_model_parallel_group()
        return gather(self._inspector.end_step(), group, self._device)

    def _take_tp_bytes(self) -> int | None:
        if self.config.trainer.tensor_parallel == 1:
            return None
        return self._meter.take() + (self._installation.take_sent_bytes() if self._installation else 0)

    @torch.no_grad()
    def _validate(self) -> float:
        self._state.chunk.eval()
        losses = [
            self._pass(self._batches.validation(idx), forward_only=True)
            for idx in range(self.config.trainer.val_batches)
        ]
        self._state.chunk.train()
        return sum(losses) / len(losses)

    def _pass(self, batches: Iterator[Batch], forward_only: bool) -> float:
        """Run the schedule over one global batch; returns its loss averaged over tokens, the same on every process."""
        outputs = self._forward_backward(
            forward_step_func=_forward_step,
            data_iterator=batches,
            model=[self._state.chunk],
            num_microbatches=self.config.trainer.num_microbatches,
            seq_length=self.config.model.sequence_length,
            micro_batch_size=self.config.trainer.micro_batch_size,
            forward_only=forward_only,
        )
        total = torch.zeros(2, dtype=torch.float32, device=self._device)
        for output in outputs:  # filled on the last pipeline stage only
            total += output["lm loss"]
        if parallel_state.is_pipeline_last_stage():
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        if self.config.trainer.pipeline_parallel > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(total, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        loss_sum, num_tokens = total.tolist()
        if self._installation is not None:
            self._installation.check()  # the pass has run: nothing that it met goes into an update or a checkpoint
        return loss_sum / num_tokens

    def _count_nonfinite(self, result: StepResult) -> None:
        if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            self._num_nonfinite = 0
            return
        self._num_nonfinite += 1
        what = "gradients" if math.isfinite(result.loss) else "loss"
        if self._record is not None:
            logger.warning("step %d: the %s is not finite; the update was skipped", result.step, what)
        if self._num_nonfinite >= self.config.trainer.max_nonfinite_steps:
            raise NonFiniteError(
                f"non-finite {what} for {self._num_nonfinite} steps in a row, up to step {result.step} "
                f"(trainer.max_nonfinite_steps={self.config.trainer.max_nonfinite_steps}); the updates were skipped. "
                "Try a lower optim.lr, a longer optim.warmup_steps, or tp_comm=nccl to tell whether communication "
                "is the cause."
            )


def _install(chunks: list[Any], config: PretrainConfig) -> Any:
    """Give the model its tensor-parallel communication; returns the Installation, None for Megatron's own."""
    if not config.tp_comm.quantizes or config.trainer.tensor_parallel == 1:
        return None
    from echo_megatron import install

    return install(chunks, config.tp_comm)


def _forward_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Summed loss, tokens, and both for the log; Megatron divides the first by the second."""
        mask = batch["loss_mask"]
        loss_sum = (losses.float() * mask).sum()
        num_tokens = mask.sum()
        return loss_sum, num_tokens.int(), {"lm loss": torch.stack([loss_sum.detach(), num_tokens])}

    return output, loss


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
