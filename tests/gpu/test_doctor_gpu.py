"""`echo-megatron doctor` on real GPUs: the self-test through peer memory, the measurement, what follows."""

import json

import pytest
import torch

from echo_megatron import cli

NUM_GPUS = torch.cuda.device_count()


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}")
def test_two_gpus_or_more_are_tested_and_timed(capsys):
    status = cli.main(["doctor", "--json", "--timeout-s", "240"])
    report = json.loads(capsys.readouterr().out)
    findings = {finding["what"]: finding for finding in report["findings"]}
    assert status == report["exit_status"]
    assert findings["self-test"]["status"] == "good", findings["self-test"]
    assert findings["kernels"]["status"] == "good", findings["kernels"]
    run = report["run"]
    assert (run["device"], run["transport"]) == ("cuda", "p2p"), findings["transport"]
    assert run["symmetric"]
    assert {"nccl16", "echo4_local", "echo8_local", "echo4_reduce_scatter", "echo8_all_gather"} <= {
        row["row"] for row in run["rows"]
    }
    expected = report["expectation"]
    assert expected["calls_from"] == "measured here"
    assert expected["echo4"]["call_speedup"] > 1


def test_one_gpu_is_looked_at_and_its_kernels_are_loaded(capsys):
    status = cli.main(["doctor", "--json", "--no-run"])
    report = json.loads(capsys.readouterr().out)
    findings = {finding["what"]: finding for finding in report["findings"]}
    assert findings["kernels"]["status"] == "good", findings["kernels"]
    assert findings["driver"]["status"] == "good"
    assert torch.cuda.get_device_name(0) in findings["GPUs"]["found"]
    assert status in (0, 1)
