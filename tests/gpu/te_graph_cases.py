"""Cases with CUDA graphs. A failed capture can leave CUDA unusable: they come last, and a failure ends its process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import te_training as training
import torch
from te_cases import case, echo4, summary
from te_models import Setting, Trainer, build
from te_training import Run, train

GRAPHS = ("graphs_local", "graphs_te", "graphs_full_iteration", "graphs_sp_local", "graphs_sp_full_iteration")
MICROBATCHES = 2
STEPS = 5


def eager_and_graphed(setting: Setting, graphed: Callable[..., Run], sequence_parallel: bool = False) -> dict[str, Any]:
    """echo4 with graphs against echo4 without and stock without, training; then passes over one batch.

    The passes over one batch without an optimizer step are alike only if every replay begins with fresh state.
    """
    common = {"with_mask": True, "graphable": True, "sequence_parallel": sequence_parallel}
    stock = train(build(setting, **common), None, steps=STEPS, microbatches=MICROBATCHES)
    eager = train(build(setting, **common), echo4(setting), steps=STEPS, microbatches=MICROBATCHES)
    trained = graphed(setting, steps=STEPS)
    repeated = graphed(setting, steps=STEPS, update=False, same_batch=True)
    per_step = len(repeated.losses) // STEPS
    first, last = repeated.losses[:per_step], repeated.losses[-per_step:]
    names = repeated.gradients[0]
    return {
        "against_eager": training.differences(eager, trained),
        "distance_to_eager": training.distance(eager, trained),
        "distance_of_eager": training.distance(eager, stock),
        "eager_calls": eager.num_calls,
        "repeated_losses": [first, last],
        "repeated_gradients": [n for n in names if not torch.equal(names[n], repeated.gradients[-1][n])][:5],
        **summary(trained, stock),
    }


@case("graphs_sp_local")
def graphs_sp_local(setting: Setting) -> dict[str, Any]:
    return graphs_local(setting, sequence_parallel=True)


@case("graphs_sp_full_iteration")
def graphs_sp_full_iteration(setting: Setting) -> dict[str, Any]:
    return graphs_full_iteration(setting, sequence_parallel=True)


@case("graphs_local")
def graphs_local(setting: Setting, sequence_parallel: bool = False) -> dict[str, Any]:
    """Megatron's own graphs, one a layer: the first step is eager and captures in its end."""

    def graphed(setting: Setting, **options: Any) -> Run:
        from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

        model = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 2, "sequence_parallel": sequence_parallel}
        trainer = build(setting, with_mask=True, **model)
        try:
            return train(trainer, echo4(setting), microbatches=MICROBATCHES, **options)
        finally:
            torch.cuda.synchronize()
            delete_cuda_graphs()
            torch.cuda.set_stream(torch.cuda.default_stream())

    return eager_and_graphed(setting, graphed, sequence_parallel)


@case("graphs_te")
def graphs_te(setting: Setting) -> dict[str, Any]:
    """Transformer Engine's graphs of whole layers, captured after the first step, as Megatron's training loop does."""

    def graphed(setting: Setting, **options: Any) -> Run:
        from megatron.core import num_microbatches_calculator as calculator
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(0, None, MICROBATCHES * setting.batch, setting.batch, 1)
        torch.cuda.set_stream(torch.cuda.Stream())
        trainer = build(setting, with_mask=True, cuda_graph_impl="transformer_engine", cuda_graph_warmup_steps=1)
        helper = TECudaGraphHelper(
            [trainer.chunk], trainer.config, setting.sequence, setting.batch, [trainer.optimizer]
        )

        def capture(step: int) -> None:
            if step == 1:
                helper.create_cudagraphs()

        try:
            return train(trainer, echo4(setting), microbatches=MICROBATCHES, before_step=capture, **options)
        finally:
            torch.cuda.synchronize()
            if helper.graphs_created():
                helper.delete_cuda_graphs()
            torch.cuda.set_stream(torch.cuda.default_stream())
            calculator.unset_num_microbatches_calculator()

    return eager_and_graphed(setting, graphed)


@case("graphs_full_iteration")
def graphs_full_iteration(setting: Setting, sequence_parallel: bool = False) -> dict[str, Any]:
    """One graph of a whole step without the optimizer, captured in the third step."""

    def graphed(setting: Setting, **options: Any) -> Run:
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

        model = {"cuda_graph_impl": "full_iteration", "sequence_parallel": sequence_parallel}
        trainer: Trainer = build(setting, with_mask=True, **model)
        wrapper = FullCudaGraphWrapper(trainer.schedule, cuda_graph_warmup_steps=2)
        trainer.schedule = wrapper
        try:
            return train(trainer, echo4(setting), microbatches=MICROBATCHES, **options)
        finally:
            torch.cuda.synchronize()
            wrapper.reset_cuda_graph()
            StaticBufferLoader.static_buffers = {"training": [], "validation": []}

    return eager_and_graphed(setting, graphed, sequence_parallel)
