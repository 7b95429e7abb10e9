"""What the tests of the communicator on gloo groups share."""

import torch
import torch.distributed as dist

NUM_SITES = 3
ROUGHLY = 2.0**-4  # a constant is one rotated value a block: its scale has 3 mantissa bits


def contribution(rank, num_values, site_idx, dtype):
    generator = torch.Generator().manual_seed(1000 * num_values + 10 * rank + site_idx)
    return (torch.randn(num_values, generator=generator) * 10.0 ** (site_idx - 1)).to(dtype)


class CountedBytes:
    """Bytes that this rank hands to torch.distributed for its peers, by counting inside the real calls."""

    def __init__(self):
        self.sent = 0
        self._originals = dist.all_to_all_single, dist.all_gather_into_tensor

    def __enter__(self):
        all_to_all, all_gather = self._originals

        def counted_all_to_all(output, tensor, receive_sizes, send_sizes, group, **kwargs):
            assert tensor.dtype is torch.uint8 and send_sizes[dist.get_rank()] == 0
            self.sent += sum(send_sizes)
            return all_to_all(output, tensor, receive_sizes, send_sizes, group=group, **kwargs)

        def counted_all_gather(output, tensor, group, **kwargs):
            if tensor.dtype is torch.uint8:  # the agreement on the call is int64: 48 B, not payload
                self.sent += tensor.numel() * (group.size() - 1)
            return all_gather(output, tensor, group=group, **kwargs)

        dist.all_to_all_single, dist.all_gather_into_tensor = counted_all_to_all, counted_all_gather
        return self

    def __exit__(self, *_):
        dist.all_to_all_single, dist.all_gather_into_tensor = self._originals
