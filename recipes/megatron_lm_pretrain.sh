#!/usr/bin/env bash
# Pretrains Qwen3-0.6B with Megatron-LM's own pretrain_gpt.py; TP_COMM is the only difference between 4-bit and 16-bit runs.
#
#   MEGATRON_LM=/path/to/Megatron-LM DATA_PREFIX=/data/tokens TP_COMM=echo4 recipes/megatron_lm_pretrain.sh [ARGUMENT…]
#
# MEGATRON_LM   checkout of NVIDIA/Megatron-LM (releases: docs/megatron_lm.md)
# DATA_PREFIX   Megatron indexed dataset of Qwen3's token ids, without .bin and .idx (docs/data.md makes one); 99 % train
# TP_COMM       echo4 (the default), nccl, echo8, echo4_paper, echo8_paper
# OUT           folder for checkpoints and TensorBoard events; runs/megatron_lm_$TP_COMM
# TP, NPROC     tensor-parallel size (2) and GPUs of this host (TP)
# TRANSFORMER   transformer_engine (Megatron's default), or local where it is not installed
# PYTHON        the interpreter (python3)
#
# ARGUMENT… goes to Megatron-LM, after and therefore over what is set here: --train-iters 1000 --echo-eta 0.5
# Several hosts: run `torchrun -m echo_megatron.integrations.megatron_lm …` yourself; tensor parallelism stays in a host.
set -euo pipefail

: "${MEGATRON_LM:?expected the folder of a Megatron-LM checkout}"
: "${DATA_PREFIX:?expected the prefix of a Megatron indexed dataset}"
tp_comm=${TP_COMM:-echo4}
out=${OUT:-runs/megatron_lm_$tp_comm}
tp=${TP:-2}
transformer=${TRANSFORMER:-transformer_engine}

model=(
    --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072
    --num-attention-heads 16 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 1000000
    --seq-length 2048 --max-position-embeddings 2048
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --transformer-impl "$transformer"
)
if [ "$transformer" = local ]; then # what needs Apex
    model+=(--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm)
fi

# 151,936 rows of embedding at every TP up to 8. The data holds ids, so that no tokenizer is needed.
vocabulary=(--tokenizer-type NullTokenizer --vocab-size 151936 --make-vocab-size-divisible-by 16)

# configs/optim/adamw.yaml and configs/trainer/paper.yaml, at TP=2.
training=(
    --micro-batch-size 8 --global-batch-size 384 --train-iters 12716 --bf16
    --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine --lr-warmup-iters 100
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-5 --weight-decay 0.1 --clip-grad 1.0
    --data-path "$DATA_PREFIX" --split 99,1,0
    --eval-interval 500 --eval-iters 10 --log-interval 10 --tensorboard-log-interval 1
    --save "$out/checkpoints" --load "$out/checkpoints" --save-interval 1000 --tensorboard-dir "$out/events"
)

export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron-LM asks for it with tensor parallelism
exec "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node "${NPROC:-$tp}" \
    -m echo_megatron.integrations.megatron_lm "$MEGATRON_LM/pretrain_gpt.py" \
    --tensor-model-parallel-size "$tp" "${model[@]}" "${vocabulary[@]}" "${training[@]}" --tp-comm "$tp_comm" "$@"
