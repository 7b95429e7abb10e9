"""What a Megatron-Bridge configuration shows before a model is built, and what a checkpoint shows of its run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.bridge.training.utils.checkpoint_utils import (
    get_checkpoint_name,
    get_checkpoint_run_config_filename,
    is_checkpoint_iteration_directory,
)
from megatron.bridge.utils.common_utils import get_rank_safe, print_rank_0

from echo_megatron.integrations.bridge_config import describe
from echo_megatron.integrations.megatron_checks import check_config, uses_cuda_graphs
from echo_megatron.reference import check_group

if TYPE_CHECKING:
    from megatron.bridge.training.state import GlobalState

    from echo_megatron.integrations.bridge import EchoConfigContainer

# Overrides that check_config does not know, and why they can't be combined with Echo.
_REFUSED = {
    "model.use_transformer_engine_full_layer_spec": "Transformer Engine's own layers have none of Megatron's linears",
    "comm_overlap.tp_comm_overlap": "userbuffers replace the all-reduce that Echo replaces",
    "dist.use_megatron_fsdp": "sharded parameters were not tried together with Echo",
    "dist.use_torch_fsdp2": "sharded parameters were not tried together with Echo",
    "ddp.use_megatron_fsdp": "sharded parameters were not tried together with Echo",
    "inprocess_restart.enabled": "it builds the model anew while Echo holds memory that aborted ranks shared",
}
_LOGGERS = ("tensorboard_dir", "wandb_project", "mlflow_experiment", "comet_project")


def tensor_parallel_size(config: EchoConfigContainer) -> int:
    return getattr(config.model, "tensor_model_parallel_size", 1)


def check_container(config: EchoConfigContainer) -> None:
    """Raises ValueError for what Echo can't be combined with, by the name of its override; nothing with TP size 1."""
    echo = config.echo.resolve()
    if not echo.quantizes or tensor_parallel_size(config) == 1:
        return
    if hasattr(config.model, "megatron_mimo_parallelism_config"):
        raise ValueError(
            "echo: MegatronMIMOProvider is not supported: its modules have tensor-parallel groups of their own. "
            "Expected a GPT or hybrid model, or echo.tp_comm=nccl"
        )
    try:
        check_group(tensor_parallel_size(config), echo)
    except ValueError as error:
        raise ValueError(f"echo: model.tensor_model_parallel_size: {error}; or echo.tp_comm=nccl") from error
    for override, why in _REFUSED.items():
        section, option = override.split(".")
        if getattr(getattr(config, section), option, False):
            raise ValueError(
                f"echo: {override}=True is not supported: {why}. Expected {override}=False, or echo.tp_comm=nccl"
            )
    check_config(config.model, echo)
    if config.echo.inspect_every and uses_cuda_graphs(config.model):
        raise ValueError(
            f"echo.inspect_every={config.echo.inspect_every}: a CUDA graph's replay runs no Python, so nothing could "
            "be measured; set echo.inspect_every=0, or model.cuda_graph_impl=none for a run that is measured"
        )
    if config.echo.inspect_every and not any(getattr(config.logger, name, None) for name in _LOGGERS):
        raise ValueError(
            f"echo.inspect_every={config.echo.inspect_every}: the run has no logger that its numbers could go to; set "
            f"one of {', '.join(f'logger.{name}' for name in _LOGGERS)}, or echo.inspect_every=0"
        )


def tell_of_other_arm(state: GlobalState) -> None:
    """Says so on rank 0 where the checkpoint that training goes on from was written with another communication."""
    folder, step = state.cfg.checkpoint.load, state.train_state.step
    if not folder or step == 0 or get_rank_safe() != 0:
        return
    checkpoint = folder if is_checkpoint_iteration_directory(folder) else get_checkpoint_name(folder, step)
    saved = describe(_section_of_run(Path(get_checkpoint_run_config_filename(checkpoint))))
    own = describe(state.cfg.echo.to_cfg_dict())
    if saved != own:
        print_rank_0(
            f"echo: the checkpoint of step {step} was written with {saved}, this run has {own}; the weights are "
            "compatible, and training goes on with this run's communication"
        )


def _section_of_run(path: Path) -> dict[str, Any] | None:
    """The section `echo` of a checkpoint's run_config.yaml; None where there is none, or no such file."""
    import yaml

    return yaml.safe_load(path.read_text()).get("echo") if path.is_file() else None


def log_metrics(state: GlobalState, metrics: dict[str, float], step: int) -> None:
    """Hands metrics to the run's loggers, which Bridge makes on the last rank.

    Args:
        state: Bridge's, which holds the loggers.
        metrics: values by tag.
        step: the step's number in Bridge's own log.
    """
    if state.tensorboard_logger is not None:
        for tag, value in metrics.items():
            state.tensorboard_logger.add_scalar(tag, value, step)
    if state.wandb_logger is not None:
        state.wandb_logger.log(metrics, step)
    for logger in (state.mlflow_logger, state.comet_logger):
        if logger is not None:
            logger.log_metrics(metrics, step=step)
