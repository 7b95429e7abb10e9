"""`echo-megatron bench`: time of one all-reduce against NCCL, ceilings, figures, and the table of measured choices."""
