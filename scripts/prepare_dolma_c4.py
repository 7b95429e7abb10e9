#!/usr/bin/env python
"""Prepare pretraining data: Dolma's C4 shards or ready token arrays to Megatron's indexed dataset (docs/data.md)."""

import sys

from echo_megatron.data.prepare_cli import main

if __name__ == "__main__":  # the workers are spawned and import this file
    sys.exit(main())
