"""The thin pretraining loop: Megatron-core's model, dataset, optimizer, scheduler and checkpoint, assembled."""
