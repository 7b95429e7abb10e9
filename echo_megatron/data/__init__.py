"""Data for pretraining: prepare it, check it, and read it through Megatron-core's own datasets.

`sample` prepares the small quickstart corpus, `dolma` tokenizes Dolma's C4 shards, `tokens` packs ready token arrays;
all
three leave a folder with Megatron's `.bin`/`.idx` pairs and a `manifest.json` (`PreparedData`). `gpt.build_datasets`
turns such
a folder, or any other indexed dataset, into Megatron-core `GPTDataset`s; it is not imported here because it imports
Megatron.
"""

from echo_megatron.data.manifest import PreparedData, dataset_fingerprint
from echo_megatron.data.sample import prepare_sample

__all__ = ["PreparedData", "dataset_fingerprint", "prepare_sample"]
