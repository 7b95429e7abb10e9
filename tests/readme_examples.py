"""Results of every kind that scripts/update_readme.py shows, made up, and lines that it writes of them."""

from __future__ import annotations

from typing import Any

from echo_megatron.evaluate.settings import parse_setting

STATISTIC = {"mean": 5.5, "sd": None, "n": 1}
ARM = {
    "label": "echo4",
    "baseline": False,
    "seeds": [1],
    "lr": 0.003,
    "steps": ["300"],
    "step_1000": None,
    "tail": STATISTIC,
    "delta": 0.0123,
    "delta_error": None,
    "delta_percent": 0.22,
    "validation": STATISTIC,
    "tp_bytes": 2.0e9,
    "tp_bytes_ratio": 0.2,
    "tokens_per_s": 1234.5,
}
MADE = {"machine": {"gpu": "H200"}, "versions": {"torch": "2.11.0"}, "commit": "abc", "command": "python x"}
RUN = {**MADE, "date": "2026-01-01", "method": "Medians.", "ceilings": None}
ALL_REDUCE = {
    "world_size": 2,
    "ceilings": {"wire_gb_per_s": 390.1, "hbm_gb_per_s": 4188.0},
    "rough_places": ["echo4: 996 B 1.0 ms, 1,000 B 1.2 ms"],
    "runs": [RUN, {**RUN, "commit": "def"}],
    "rows": [
        {
            "row": name,
            "policy": policy,
            "state_dtype": None,
            "bytes": size,
            "ms": ms,
            "nccl_ratio": 0.5 / ms,
            "wire_fraction": 0.5,
            "hbm_fraction": None,
            "run": int(name == "auto"),
            **({"matmuls": model} if model else {}),
        }
        for name, policy, size, ms, model in (
            ("nccl16", None, 2**26, 0.5, None),
            ("nccl16", None, 2**16, 0.021, None),
            ("symm_mem_one_shot", None, 2**16, 0.019, None),
            ("echo4", "rotated", 2**26, 0.15, None),
            ("echo4", "rotated", 2**27, 0.25, None),
            ("echo4_consensus_critical", "rotated", 2**26, 0.4, "llama3_8b"),
            ("echo4_consensus_critical", "rotated", 2**26, 0.3, "qwen3_0.6b"),
            ("echo4", "rotated", 2**30, 1.0, None),
            ("auto", "rotated", 2**16, 0.02, None),
        )
    ],
}
EVALUATION = {
    "settings": {
        "model": "small",
        "tokens": 4096,
        "data": "wiki",
        "note": "test",
        "context": 1024,
        "precision": "fp32",
        "num_sites": 60,
    },
    "runs": [MADE],
    "rows": [
        {
            "setting": setting,
            "key": f"P={size} simulated {parse_setting(setting).key}",
            "P": size,
            "ranks": "simulated",
            "bits": round(bits),
            "bits_a_value": bits,
            "perplexity": perplexity,
            "delta_percent": delta,
            "delta_loss": None if delta is None else delta / 100,
            "delta_loss_error": None if delta is None else 0.001,
        }
        for setting, size, bits, perplexity, delta in (
            ("16bit", 2, 16.0, 21.2, None),
            ("16bit", 4, 16.0, 21.2, None),
            ("echo4", 2, 4.28, 21.6, 1.887),
            ("echo4", 4, 4.28, None, None),
            ("echo4_paper", 2, 4.28, 42.4, 100.0),
            ("echo4_paper,policy=naive", 4, 4.28, 39.5, 86.3),
        )
    ],
}
ERRORS = [
    "small, 4,096 tokens of wiki (test): increase of perplexity",
    "| echo4 | 4.28 | +1.89 ± 0.10 | not finite |",
    "what echo4 adds: 53.0 at P=2.",
    "| 4 bits | +4.8 | +1.0 |  | not finite |",
]
EXAMPLES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "errors_smollm2_135m": (EVALUATION, ERRORS),
    "errors_smollm2_135m_books": (EVALUATION, ERRORS),
    "errors_qwen3_0p6b": (EVALUATION, ERRORS),
    "policy_errors_smollm2_135m": (
        {
            "settings": {
                "num_sites": 60,
                "context": 1024,
                "world_size": 4,
                "tokens": 4096,
                "data": "wiki",
                "threshold": 100.0,
                "massive": ["layers.1 (1,000)"],
                "perplexity_16bit": 20.0,
            },
            "rows": [
                {
                    "bits": 4,
                    "group_size": 128,
                    "policy": "naive",
                    "span": 0.875,
                    "relative_error": 0.125,
                    "relative_error_of_largest": 0.00025,
                    "perplexity": 30.0,
                    "perplexity_massive_exact": 25.0,
                    "perplexity_control_exact": None,
                }
            ],
            "made_by": MADE,
        },
        [
            "at the 1 sites where a value is over 100 times the rms of its message: layers.1 (1,000);",
            "| 4 | 128 | naive | 0.88 | 0.1250 | 0.00025 | 30.000 (+50.00 %) | 25.000 (+25.00 %) |  |",
            "commit abc",
        ],
    ),
    "ttft": (
        {
            **MADE,
            "world_size": 2,
            "prefill": [
                {
                    "model": "llama3_8b",
                    "load": load,
                    "batch": 4,
                    "sequence": 2048,
                    "setting": setting,
                    "rounds": 2,
                    "ms": ms,
                    "speedup": 100.0 / ms,
                }
                for load, setting, ms in ((0, "nccl16", 100.0), (0, "echo4", 80.0), (100, "nccl16", 100.0))
            ],
        },
        ["| llama3_8b | 0 % | 4 x 2,048 | 2 | 100.0 | 1.250 |", "| llama3_8b | 100 % | 4 x 2,048 | 2 | 100.0 |  |"],
    ),
    "ablation_qwen3_0p6b": (EVALUATION, ["| echo4 | 4.28 | 21.600 (+1.89 %) | not finite |", "at commit abc"]),
    "ablation_qwen3_200m": (EVALUATION, ["| echo4 | 4.28 | 21.600 (+1.89 %) | not finite |", "at commit abc"]),
    "ablation_smollm2_135m": (
        EVALUATION,
        [
            "small, 4,096 tokens of wiki (test) in windows of 1,024, fp32, 60 sites.",
            "| 16bit | 16.00 | 21.200 | 21.200 |",
            "| echo4 | 4.28 | 21.600 (+1.89 %) | not finite |",
            "| naive asymmetric | 39.500 (+86.30 %) |  | 7.296 |",
            "at commit abc",
        ],
    ),
    "quickstart": (
        {
            "title": "tiny, P = 2",
            "caption": "Data: sample.",
            "windows": {"tail": 100},
            "validation_step": 300,
            "arms": [ARM],
            "baseline": "nccl",
            "differences": [{"other": "nccl", "sentence": "echo4 − nccl: +0.0123"}],
            "remarks": ["In fp32 32 bits."],
            "runs": [MADE, {**MADE, "commit": "def"}],
        },
        ["| echo4 | 1 | 5.5000 | +0.0123 | +0.22 |", "- In fp32 32 bits.", "commit abc; def"],
    ),
    "training_study": (
        {
            "title": "small, P = 2",
            "caption": "Data: books.",
            "windows": {"tail": 83},
            "validation_step": 250,
            "baseline": "nccl",
            "arms": [ARM],
            "differences": [
                {"other": "nccl", "sentence": "echo4 − nccl: +0.0123"},
                {"other": "echo4", "sentence": "last − echo4: 26.44"},
            ],
            "remarks": [],
            "runs": [MADE],
        },
        ["| echo4 | 1 | 5.5000 | +0.0123 | +0.22 | 5.5000 | 0.200 |", "- echo4 − nccl: +0.0123", "commit abc"],
    ),
    "train_qwen3_0p6b_h200x2": (
        {
            "title": "large, P = 2",
            "caption": "Data: books.",
            "windows": {"tail": 100},
            "validation_step": 1000,
            "baseline": "nccl",
            "arms": [ARM],
            "differences": [{"other": "nccl", "sentence": "echo4 − nccl: +0.0123"}],
            "remarks": ["The runs differ in commit."],
            "runs": [MADE],
            "paper": {"source": "Table 7", "rows": [{"arm": "16bit", "lr": 3e-4, "tail100": 3.197, "step1000": 4.095}]},
        },
        [
            "- echo4 − nccl: +0.0123",
            "- The runs differ in commit.",
            "| 16bit, the paper | 3.0e-04 | 4.095 | 3.197 |",
            "commit abc",
        ],
    ),
    "step_h200x2": (
        {
            **MADE,
            "world_size": 2,
            "link_bytes": 2**30,
            "links": [{"load": 0, "slowdown": 1.0}, {"load": 100, "slowdown": 1.25}],
            "echo": {"echo4": "echo: 4-bit rotated"},
            "rows": [
                {
                    "model": "llama3_8b",
                    "setting": setting,
                    "load": 0,
                    **{f"{what}_ms": ms for what in ("step", "forward")},
                    **{f"{what}_speedup": 400.0 / ms for what in ("step", "forward")},
                    **{f"{what}_share": share for what in ("step", "forward")},
                }
                for setting, ms, share in (("nccl16", 400.0, 0.0), ("echo4", 380.0, 0.5), ("skipped", 360.0, 1.0))
            ],
        },
        [
            "0 %: 1.00, 100 %: 1.25.",
            "| llama3_8b | 16 bits, ms | 400.0 |",
            "| llama3_8b | echo4, speed-up | 1.053 |",
            "| llama3_8b | paper, speed-up | 1.090 |",
            "echo: 4-bit rotated",
        ],
    ),
    "all_reduce_h200x2": (
        ALL_REDUCE,
        [
            "| nccl16 | 0.500 (1.00) |  |  |  |  |",
            "| echo4 (rotated) | 0.150 (3.33) | 0.250 (2.00) |  |  | 1.000 (0.50) |",
            "| echo4_consensus_critical (rotated, llama3_8b) | 0.400 (1.25) |",
            "| auto (rotated) |  |  | 0.020 (25.00) |",
            "390 GB/s to a peer, each way, 4188 GB/s in HBM",
            "of the 2 runs that they are of",
            "commit abc; def",
        ],
    ),
    "all_reduce_targets": (
        ALL_REDUCE,
        [
            "| echo4 (rotated) | **3.33** | 2.00 |  |  | 0.50 |",
            "| echo4_consensus_critical (rotated, qwen3_0.6b) | 1.67 |",
            "Slower than NCCL: at no size.",
            "| target | 18.0 |",
            "| NCCL | 21.0 |",
            "| symm_mem, the faster | 19.0 |",
            "| auto (rotated) | 20.0 |",
            "- echo4: 996 B 1.0 ms, 1,000 B 1.2 ms",
            "| echo4 (rotated) | 1.00 | 0.50 (50%) |  |",
        ],
    ),
    "collective_h200x2": (
        {
            **MADE,
            "world_size": 2,
            "transport": "collective",
            "rows": [{"bytes": 2**26, "nccl_ms": 0.5, "echo4_ms": 1.25, "echo4_paper_ms": 1.5}],
        },
        [
            "| MiB a rank (bf16) | nccl, ms | echo4, ms | echo4_paper, ms |",
            "| 64 | 0.500 | 1.250 | 1.500 |",
            "H200",
        ],
    ),
    "quantizer_study": (
        {
            "settings": {"model": "small", "num_tokens": 4096, "text": "wiki", "context": 1024},
            "made_by": MADE,
            "rows": [
                {
                    "section": section,
                    "label": label,
                    "residual": residual,
                    "algorithm": algorithm,
                    "world_size": 4,
                    "bits_a_value": bits,
                    "perplexity": perplexity,
                }
                for section, label, residual, algorithm, bits, perplexity in (
                    ("16 bits", "16 bits", None, None, 16.0, 21.17),
                    ("The paper's wire", "zero_aware g=128", "none", "two_shot", 4.28, 34.04),
                    ("The paper's wire", "zero_aware g=128", "local", "two_shot", 4.28, 26.44),
                    ("The presets with the paper's coefficients", "echo4", "local", "two_shot", 4.28, 22.11),
                    ("Noise: other rank orders", "rotated g=32, slices 3 2 1 0", "local", "two_shot", 4.28, 22.2),
                    ("Noise: other rank orders", "rotated g=32, slices 1 3 0 2", "local", "two_shot", 4.28, 22.4),
                )
            ],
        },
        [
            "| 16 bits |  | 16.00 |  |  | 21.17 |",
            "| zero_aware g=128 | 4 | 4.28 | two_shot | no compensation | 34.04 |",
            "in 2 other orders: rotated g=32 local 22.20 to 22.40.",
        ],
    ),
}
EXAMPLES["training_study_tiny"] = EXAMPLES["training_study"]
