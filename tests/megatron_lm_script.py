"""A pretraining script as a user of Megatron-LM writes it: it knows nothing of Echo.

`--test-model-provider` builds the model through a provider function, as all releases before 0.19 do; without it
Megatron's own builder makes it from the arguments. `pretrain` has been called in three ways: until 0.17 it parses the
arguments itself, in 0.18 it is given a configuration and a provider, since 0.19 the configuration may hold the model.
"""

from __future__ import annotations

import inspect
from functools import partial

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args

LOSSES: list[float] = []


def add_own_args(parser):
    parser.add_argument_group("test").add_argument("--test-model-provider", action="store_true")
    return parser


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def loss_func(loss_mask, output):
    losses, mask = output.view(-1).float(), loss_mask.view(-1).float()
    loss, count = (losses * mask).sum(), mask.sum().to(torch.int)
    LOSSES.append((loss / count).item())
    return loss, count, {"lm loss": torch.stack([loss.detach(), count])}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


class RandomTokens(torch.utils.data.Dataset):
    """Samples of random tokens; the same on every rank, so that nothing has to be broadcast."""

    def __init__(self, count, sequence, vocab_size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(vocab_size, (count, sequence + 1), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        sequence = self.tokens.shape[1] - 1
        return {
            "tokens": self.tokens[index, :-1],
            "labels": self.tokens[index, 1:],
            "loss_mask": torch.ones(sequence),
            "position_ids": torch.arange(sequence),
            "attention_mask": torch.triu(torch.ones(1, sequence, sequence, dtype=torch.bool), 1),
        }


def datasets_provider(num_samples, vp_stage=None):
    args = get_args()
    return [
        RandomTokens(count, args.seq_length, args.vocab_size, args.seed + part)
        for part, count in enumerate(num_samples)
    ]


datasets_provider.is_distributed = True


def train(arguments):
    from megatron.training import argument_utils

    model = None
    if hasattr(argument_utils, "gpt_config_from_args") and not arguments.test_model_provider:
        model = argument_utils.gpt_config_from_args(arguments)
    config = argument_utils.pretrain_cfg_container_from_args(arguments, *([] if model is None else [model]))
    pretrain(
        config,
        datasets_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=model_provider if model is None else None,
    )


if __name__ == "__main__":
    if "extra_args_provider" in inspect.signature(pretrain).parameters:
        model_type = ModelType.encoder_or_decoder
        pretrain(datasets_provider, model_provider, model_type, forward_step, extra_args_provider=add_own_args)
    else:
        from megatron.training.arguments import parse_and_validate_args

        train(parse_and_validate_args(extra_args_provider=add_own_args))
