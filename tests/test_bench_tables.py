"""The bench's tables, figure, targets, and rows that are measured onto earlier results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_runs import made_up_results, one_run
from matplotlib.figure import Figure

from echo_megatron.bench import all_reduce, figures, runs, tables, targets
from echo_megatron.bench.critical_path import MODELS
from echo_megatron.bench.rows import LARGE_SIZES, MIB, all_rows


class TestTables:
    def test_ratios_are_to_the_faster_nccl_of_the_size(self) -> None:
        entries = [
            {"row": "nccl16", "bytes": 1024, "ms": 1.0},
            {"row": "nccl16", "bytes": 4096, "ms": 4.0},
            {"row": "echo4", "bytes": 1024, "ms": 0.25},
            {"row": "echo4", "bytes": 4100, "ms": 1.0, "beside": True},
            {"row": "critical", "bytes": 1024, "ms": -0.1},
            {"row": "nccl16", "bytes": 1024, "ms": 0.5},
            {"row": "nccl16", "bytes": 4096, "ms": 5.0},
        ]
        found = {(e["row"], e["bytes"]): e for e in all_reduce.with_ratios(entries)}
        assert len(found) == 5
        assert found["nccl16", 1024]["ms"] == 0.5 and found["nccl16", 4096]["ms"] == 4.0
        assert found["nccl16", 4096]["drift"] == pytest.approx(0.25)
        ratios = {key: entry["nccl_ratio"] for key, entry in found.items()}
        assert ratios == {
            ("nccl16", 1024): 1.0,
            ("nccl16", 4096): 1.0,
            ("echo4", 1024): 2.0,
            ("echo4", 4100): 4.0,
            ("critical", 1024): None,
        }

    def test_rough_places(self) -> None:
        def entry(size: int, ms: float, row: str = "echo4") -> dict[str, Any]:
            return {"row": row, "bytes": size, "ms": ms}

        assert tables.rough_places([entry(1000, 1.0), entry(1004, 1.09), entry(1200, 2.0)]) == []
        assert tables.rough_places([entry(1000, 1.0), entry(1004, 2.0, "echo8")]) == []
        [place] = tables.rough_places([entry(1000, 1.2), entry(1004, 1.0), entry(996, 1.15)])[:1]
        assert place.startswith("echo4: 996 B 1.1500 ms, 1,004 B 1.0000 ms")

    def test_paper_table_has_the_paper_s_rows_and_ours_beside(self) -> None:
        lines = tables.paper_table(made_up_results()["rows"])
        assert (
            "| + fused compensator | paper | 0.44 (1.59) | 0.75 (1.69) | 1.19 (2.06) | 2.15 (2.14) | 4.30 (2.09) |"
            in lines
        )
        ours = [line for line in lines if "| ours" in line]
        assert len(ours) == 6 + len(MODELS)
        assert "| Echo 4-bit | ours | 0.037 (" in "\n".join(ours)

    def test_markdown_and_overview(self) -> None:
        results = made_up_results()
        text = tables.markdown(results)
        for expected in ("## Ratios to NCCL", "flashinfer_fp8: not installed", "wire_gb_per_s 390", "torchrun x"):
            assert expected in text
        lines = tables.overview_table(results["rows"], ["echo4", "nccl16"], LARGE_SIZES[:2])
        assert lines[0] == "| row | 64 MiB | 128 MiB |"
        assert [line.split(" | ")[0] for line in lines[2:]] == ["| echo4 (rotated)", "| echo4 (zero_aware)", "| nccl16"]

    def test_figure(self, tmp_path: Path) -> None:
        path = tmp_path / "all_reduce.json"
        path.write_text(json.dumps(made_up_results()))
        assert all_reduce.main(["--render", str(path)]) == 0
        assert path.with_suffix(".png").stat().st_size > 20_000
        assert path.with_suffix(".md").read_text().startswith("# One all-reduce at P = 2")
        assert {*figures.COLOURS, *figures.SMALL_COLOURS} <= {row.name for row in all_rows()}

    def test_a_panel_s_legend_names_no_row_without_a_point_in_it(self) -> None:
        axes = Figure().subplots()
        figures._plot(axes, {}, {"label": "elsewhere"})
        figures._plot(axes, {8: 2.0, 4: 1.0}, {"label": "here"})
        assert axes.get_legend_handles_labels()[1] == ["here"]
        assert [list(data) for data in axes.lines[0].get_data()] == [[4, 8], [1.0, 2.0]]

    def test_targets_are_of_rows_that_exist(self) -> None:
        names = {name for of, _ in targets.TARGETS.values() for name in of}
        assert {*names, *targets.BOUNDED} <= {row.name for row in all_rows()}
        assert all(len(of) == len(LARGE_SIZES) for _, of in targets.TARGETS.values())

    def test_small_messages_have_symm_mem_s_time_as_limit_where_it_is_a_tenth_less(self) -> None:
        def entry(row: str, size: int, ms: float) -> dict[str, Any]:
            return {"row": row, "bytes": size, "ms": ms, "nccl_ratio": 0.017 / ms}

        entries = [entry("symm_mem_one_shot", 4096, 0.017), entry("symm_mem_one_shot", 16384, 0.012)]
        entries += [entry("auto", 4096, 0.0175), entry("auto", 16384, 0.013), entry("auto", 1 << 20, 0.001)]
        lines = targets.small_table(entries)
        assert "| target | 18.0 | 12.0 |  |" in lines and "| auto | **17.5** | 13.0 | 1.0 |" in lines
        assert targets.slower_than_nccl(entries) == "Slower than NCCL: auto at 4 KiB (0.97)."


class TestOnto:
    """Rows of a new run within the results of earlier ones."""

    @staticmethod
    def new_run(*entries: dict[str, Any], **fields: Any) -> dict[str, Any]:
        rows = [{"policy": None, "state_dtype": None, **entry} for entry in entries]
        return runs.of_one_run({**one_run(all_reduce.with_ratios(rows)), "left_out": {}, "commit": "def", **fields})

    def test_rows_are_replaced_by_series_and_size_and_keep_their_ratio(self) -> None:
        base = made_up_results()
        echo4 = {"row": "echo4", "policy": "rotated", "ms": 0.01, "bytes": 64 * MIB}
        critical = {"row": "echo4_paper_critical", "policy": "zero_aware", "state_dtype": "bf16", "bytes": 64 * MIB}
        new = self.new_run(
            {"row": "nccl16", "bytes": 64 * MIB, "ms": 0.04},
            echo4,
            {**echo4, "bytes": 64 * MIB + 4, "beside": True},
            {**critical, "matmuls": "llama3_8b", "ms": 0.02},
            method="Another.",
        )
        result = runs.merged(base, new, ["echo4 rotated"])
        before, after = ({(tables.key_of(row), row["bytes"]): row for row in of["rows"]} for of in (base, result))
        changed = {place for place in after if after[place] != before.get(place)}
        assert len(after) == len(before) + 1 and len(result["rows"]) == len(after)
        assert {(key[0], key[3], size) for key, size in changed} == {
            ("echo4", None, 64 * MIB),
            ("echo4", None, 64 * MIB + 4),
            ("echo4_paper_critical", "llama3_8b", 64 * MIB),
        }
        assert {after[place]["run"] for place in changed} == {1}
        ratios = {place[0][0]: after[place]["nccl_ratio"] for place in changed}
        assert ratios == {"echo4": 4.0, "echo4_paper_critical": 2.0}
        assert [run["commit"] for run in result["runs"]] == ["abc", "def"]
        assert result["runs"][1]["nccl16_ms"] == {str(64 * MIB): 0.04}, "NCCL's row stays the base's"
        assert result["commit"] == "abc" and result["left_out"] == base["left_out"]
        first, second = tables.provenance(result)
        assert "commit abc" in first and "commit def" in second and "Method: Another." in second
        rows = "echo4 (rotated), echo4_paper_critical (zero_aware, bf16, llama3_8b)"
        assert second.startswith(f"Run 2, {rows}: 2026-01-01.")
        assert tables.markdown(result).count("commit def") == 1

    def test_a_method_is_told_once(self) -> None:
        result = made_up_results()
        for number, method in enumerate(("Another.", "Another.", result["method"])):
            row = {"row": "echo4", "policy": "rotated", "bytes": (number + 1) << 20, "ms": 0.01}
            result = runs.merged(result, self.new_run(row, commit=str(number), method=method), [])
        methods = [line.partition("Their ratios are to NCCL of that run.")[2] for line in tables.provenance(result)]
        assert methods == ["", " Method: Another.", " Method: run 2's.", ""]

    def test_a_run_without_rows_left_is_dropped(self) -> None:
        echo4 = {"row": "echo4", "policy": "rotated", "bytes": 64 * MIB}
        result = made_up_results()
        for commit in ("def", "ghi"):
            result = runs.merged(result, self.new_run({**echo4, "ms": 0.01}, commit=commit), [])
        assert [run["commit"] for run in result["runs"]] == ["abc", "ghi"]
        assert {row["run"] for row in result["rows"]} == {0, 1}

    def test_why_a_row_was_left_out_counts_until_it_is_tried_again(self) -> None:
        base = {**made_up_results(), "left_out": {"echo4 rotated": "late", "echo8 rotated": "late"}}
        new = self.new_run(left_out={"echo4_paper zero_aware bf16": "failed"})
        result = runs.merged(base, new, ["echo4 rotated", "echo4_paper zero_aware bf16"])
        assert result["left_out"] == {"echo8 rotated": "late", "echo4_paper zero_aware bf16": "failed"}
        assert len(result["rows"]) == len(base["rows"]), "what a run did not measure stays"

    def test_refuses_other_results(self, tmp_path: Path) -> None:
        path = tmp_path / "results.json"
        with pytest.raises(ValueError, match="expected results of this bench; got FileNotFoundError"):
            runs.load(path, None, 2)
        path.write_text(json.dumps({"rows": []}))
        with pytest.raises(ValueError, match="expected results of this bench; got KeyError"):
            runs.load(path, None, 2)
        results = made_up_results()
        path.write_text(json.dumps(results))
        assert runs.load(path, "NVIDIA H200", 2) == results
        for gpu, world_size in ((None, 2), ("NVIDIA H200", 4)):
            with pytest.raises(ValueError, match="as here; got 2 × NVIDIA H200; write to a file of its own"):
                runs.load(path, gpu, world_size)
        del results["rows"][0]["run"]
        path.write_text(json.dumps(results))
        with pytest.raises(ValueError, match="expected runs with command"):
            runs.load(path, "NVIDIA H200", 2)
