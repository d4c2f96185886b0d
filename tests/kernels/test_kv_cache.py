"""The paged cache against a model made of plain lists, on random operations; and its rules one by one."""

from __future__ import annotations

import random

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_model import Player, small_cache, state_of

from swarm.errors import InvalidRequest, OutOfMemory
from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.kvcache.cache import KVCacheManager, KvShape, StepRequest


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=True), st.integers(3, 24))
def test_random_operations_agree_with_the_model(rng: random.Random, blocks: int) -> None:
    player = Player(rng, blocks)
    for _ in range(60):
        player.step()
    player.finish()


# --- reservations ---------------------------------------------------------------------------------------------------


def append(cache: KVCacheManager, session: bytes, rows: int) -> AttentionMetadata:
    return cache.schedule([StepRequest(session, cache.length(session), rows)])


def test_what_is_reserved_is_available() -> None:
    cache = small_cache(6)
    cache.open(b"a", 3 * BLOCK_SIZE)
    cache.open(b"b", 3 * BLOCK_SIZE)
    assert cache.free_tokens == 0
    with pytest.raises(OutOfMemory, match="16 more tokens"):
        cache.open(b"c", 1)
    append(cache, b"a", 3 * BLOCK_SIZE)
    append(cache, b"b", 3 * BLOCK_SIZE)
    with pytest.raises(InvalidRequest, match="reserved 48"):
        append(cache, b"a", 1)
    cache.close(b"a")
    assert cache.free_tokens == 3 * BLOCK_SIZE


def test_a_tree_beyond_the_reservation_takes_only_unreserved_blocks() -> None:
    cache = small_cache(4)
    cache.open(b"a", BLOCK_SIZE)
    cache.open(b"b", 2 * BLOCK_SIZE)
    append(cache, b"a", BLOCK_SIZE)
    grow = StepRequest(b"a", BLOCK_SIZE, 0, (-1,), (0,))
    cache.schedule([grow])  # the fourth block is unreserved
    with pytest.raises(OutOfMemory):
        cache.schedule([StepRequest(b"a", BLOCK_SIZE, 0, (0,), (BLOCK_SIZE,))])
    cache.check_integrity()
    append(cache, b"b", 2 * BLOCK_SIZE)


def test_a_fork_shares_whole_blocks_and_copies_the_last_one_when_it_writes() -> None:
    cache = small_cache(8)
    cache.open(b"a", 3 * BLOCK_SIZE)
    append(cache, b"a", BLOCK_SIZE + 5)
    held = cache.pool.free
    cache.fork(b"a", b"b", 3 * BLOCK_SIZE)
    assert cache.pool.free == held
    metadata = append(cache, b"b", 1)
    assert metadata.copy_from.tolist() == [BLOCK_SIZE + i for i in range(5)]
    assert cache.pool.free == held - 1
    assert append(cache, b"a", 1).copy_from.numel() == 0  # now the old block is no longer shared
    cache.check_integrity()


def test_a_fork_is_refused_when_its_blocks_cannot_be_reserved() -> None:
    cache = small_cache(4)
    cache.open(b"a", 2 * BLOCK_SIZE)
    append(cache, b"a", BLOCK_SIZE + 1)
    with pytest.raises(OutOfMemory):
        cache.fork(b"a", b"b", 4 * BLOCK_SIZE)
    with pytest.raises(InvalidRequest, match="cannot be shared"):
        cache.fork(b"a", b"b", BLOCK_SIZE)
    cache.fork(b"a", b"b", 2 * BLOCK_SIZE)
    cache.check_integrity()


# --- steps that must be refused -------------------------------------------------------------------------------------

BAD_STEPS = {
    "base": (StepRequest(b"a", 2, 1), "starts at 2"),
    "nothing": (StepRequest(b"a", 3, 0), "no rows"),
    "negative causal rows": (StepRequest(b"a", 3, -1, (-1, -1), (8, 9)), "no rows"),
    "unequal lists": (StepRequest(b"a", 3, 0, (-1,), (8, 9)), "names 1 parents"),
    "too long": (StepRequest(b"a", 3, 98), "needs 101"),
    "slot too large": (StepRequest(b"a", 3, 0, (-1,), (70,)), "not within"),
    "slot negative": (StepRequest(b"a", 3, 0, (-1,), (-1,)), "not within"),
    "slot in use": (StepRequest(b"a", 3, 0, (-1,), (1,)), "in use"),
    "slot twice": (StepRequest(b"a", 3, 0, (-1, -1), (8, 8)), "in use"),
    "own parent": (StepRequest(b"a", 3, 0, (8,), (8,)), "parent slot"),
    "later parent": (StepRequest(b"a", 3, 0, (9, -1), (8, 9)), "parent slot"),
    "cycle": (StepRequest(b"a", 3, 0, (-1, 10, 9), (8, 9, 10)), "parent slot"),
    "dead parent": (StepRequest(b"a", 3, 0, (5,), (8,)), "parent slot"),
    "parent dropped by causal rows": (StepRequest(b"a", 3, 1, (1,), (8,)), "parent slot"),
    "parent just committed": (StepRequest(b"a", 3, 0, (0,), (8,), (0,)), "parent slot"),
    "commit of a dead slot": (StepRequest(b"a", 3, 1, commit_slots=(5,)), "cannot be committed"),
    "commit that skips": (StepRequest(b"a", 3, 1, commit_slots=(1,)), "cannot be committed"),
    "commit of siblings": (StepRequest(b"a", 3, 1, commit_slots=(0, 2)), "cannot be committed"),
    "commit twice": (StepRequest(b"a", 3, 1, commit_slots=(0, 0)), "cannot be committed"),
    "unknown session": (StepRequest(b"z", 0, 1), "not open"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_refused_step_changes_nothing_for_anyone(name: str) -> None:
    cache = small_cache(20)
    for key in (b"a", b"b"):
        cache.open(key, 100)
        append(cache, key, 3)
    cache.schedule([StepRequest(b"a", 3, 0, (-1, 0, -1), (0, 1, 2))])
    before = state_of(cache)
    request, sentence = BAD_STEPS[name]
    with pytest.raises(InvalidRequest, match=sentence):
        cache.schedule([StepRequest(b"b", 3, 1), request])
    assert state_of(cache) == before


def test_one_step_of_a_session_in_a_batch() -> None:
    cache = small_cache(4)
    cache.open(b"a", 20)
    with pytest.raises(InvalidRequest, match="one step of a session"):
        cache.schedule([StepRequest(b"a", 0, 1), StepRequest(b"a", 0, 1)])


def test_sessions_open_once_and_close_any_number_of_times() -> None:
    cache = small_cache(4)
    cache.open(b"a", 20)
    with pytest.raises(InvalidRequest, match="open already"):
        cache.open(b"a", 20)
    with pytest.raises(InvalidRequest, match="cannot reserve 0"):
        cache.open(b"b", 0)
    cache.close(b"a")
    cache.close(b"a")
    assert len(cache) == 0
    assert b"a" not in cache


# --- metadata ---------------------------------------------------------------------------------------------------------


def test_a_commit_without_rows_only_moves() -> None:
    cache = small_cache(4)
    cache.open(b"a", 40)
    append(cache, b"a", 15)
    tree = cache.schedule([StepRequest(b"a", 15, 0, (-1, 3, 4), (3, 4, 5))])
    metadata = cache.schedule([StepRequest(b"a", 15, 0, commit_slots=(3, 4))])
    assert metadata.rows == 0
    assert metadata.copy_from.tolist() == tree.slot_mapping[:2].tolist()
    assert metadata.copy_to[0].item() % BLOCK_SIZE == 15
    assert cache.length(b"a") == 17
    assert list(cache.slots(b"a")) == [5]


def test_earlier_metadata_keep_its_block_tables() -> None:
    cache = small_cache(60)
    cache.open(b"a", 400)
    metadata = append(cache, b"a", 2 * BLOCK_SIZE + 1)
    tables = metadata.block_tables.clone()
    cache.fork(b"a", b"b", 400)
    append(cache, b"a", 1)
    cache.rollback(b"a", 3)
    append(cache, b"a", 300)
    assert torch.equal(metadata.block_tables, tables)


def test_dtypes_and_shapes_of_metadata() -> None:
    cache = KVCacheManager(KvShape(3, 2, 4, torch.bfloat16), 100)
    assert [tuple(k.shape) for k in cache.k] == [(7, 2, 4, BLOCK_SIZE)] * 3
    assert [tuple(v.shape) for v in cache.v] == [(7, 2, BLOCK_SIZE, 4)] * 3
    assert cache.nbytes == 7 * BLOCK_SIZE * 3 * 2 * 2 * 4 * 2
    assert not any(bool(x.any()) for x in (*cache.k, *cache.v))
    cache.open(b"a", 40)
    cache.open(b"b", 40)
    metadata = cache.schedule([StepRequest(b"a", 0, 17), StepRequest(b"b", 0, 2, (-1,), (69,))])
    assert metadata.positions.dtype == metadata.slot_mapping.dtype == metadata.tree_mask.dtype == torch.int64
    assert (
        metadata.context_lens.dtype
        == metadata.sequence_index.dtype
        == metadata.block_tables.dtype
        == metadata.tree_block_tables.dtype
        == torch.int32
    )
    assert metadata.tree_mask.shape == (20, 2)
    assert metadata.block_tables.shape == (2, 2)
    assert metadata.tree_block_tables.shape[0] == 2
    assert cache.top_position == 16


def test_blocks_cost_memory_once_they_are_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCacheManager(KvShape(2, 8, 128, torch.float32), 1 << 16)
    assert cache.nbytes == 1 << 30
    cache.open(b"a", 1 << 15)
    append(cache, b"a", 40)
    assert process.memory_info().rss - before < 64 << 20
    assert not cache.k[1][4000].any()


def test_more_memory_than_there_is() -> None:
    with pytest.raises(OutOfMemory, match="do not fit"):
        KVCacheManager(KvShape(80, 64, 128, torch.float32), 1 << 40)


# --- KV transfer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 5, 5 * BLOCK_SIZE])
def test_blocks_read_from_one_cache_import_into_another(tokens: int) -> None:
    torch.manual_seed(tokens)
    source, target = small_cache(8), small_cache(8)
    for cache in (source, target):
        for tensor in (*cache.k, *cache.v):
            tensor.copy_(torch.randn_like(tensor, dtype=torch.float32))  # what others left there
        cache.open(b"other", BLOCK_SIZE)
        append(cache, b"other", 3)
        cache.open(b"a", 6 * BLOCK_SIZE)
    append(source, b"a", 5 * BLOCK_SIZE)
    source_blocks, target_blocks = source.block_ids(b"a", tokens), target.import_blocks(b"a", tokens)
    for layer in range(source.shape.layers):
        target.pool.write(layer, target_blocks, source.pool.read(layer, source_blocks, tokens))
        for at in range(tokens):
            a, b, slot = source_blocks[at // BLOCK_SIZE], target_blocks[at // BLOCK_SIZE], at % BLOCK_SIZE
            assert torch.equal(source.k[layer][a, :, :, slot], target.k[layer][b, :, :, slot])
            assert torch.equal(source.v[layer][a, :, slot], target.v[layer][b, :, slot])
        rest = tokens - (len(target_blocks) - 1) * BLOCK_SIZE
        assert not target.k[layer][target_blocks[-1], :, :, rest:].any()
        assert not target.v[layer][target_blocks[-1], :, rest:].any()
    target.check_integrity()
    assert target.length(b"a") == tokens
    append(target, b"a", 1)


@pytest.mark.parametrize("value_dim", [0, 16, 48])
def test_blocks_of_a_latent_cache_are_imported(value_dim: int) -> None:
    """Values are of another size than keys, or there are none: DeepSeek's latents, with or without index keys."""
    shape = KvShape(2, 1, 48, torch.bfloat16, value_dim)
    assert shape.bytes_per_token_per_layer == 2 * (48 + value_dim)
    source, target = (KVCacheManager(shape, 5 * BLOCK_SIZE) for _ in range(2))
    for layer in range(2):
        for tensor in (source.k[layer], source.v[layer]):
            tensor.copy_(torch.randn(tensor.shape))
    for layer in range(2):
        body = source.pool.read(layer, [3, 1], BLOCK_SIZE + 5)
        assert len(body) == 2 * shape.bytes_per_block // 2
        target.pool.write(layer, [0, 4], body)
        assert torch.equal(target.k[layer][0], source.k[layer][3])
        assert torch.equal(target.v[layer][0], source.v[layer][3])
        assert torch.equal(target.k[layer][4, ..., :5], source.k[layer][1, ..., :5])
        assert torch.equal(target.v[layer][4, :, :5], source.v[layer][1, :, :5])
        assert not target.k[layer][4, ..., 5:].any()
        assert not target.v[layer][4, :, 5:].any()


@pytest.mark.parametrize("value_dim", [-1, 0, 16])
def test_a_body_of_another_size_changes_nothing(value_dim: int) -> None:
    """A peer of another version may cache every head's keys and values, or a latent; a hostile one sends anything."""
    shape = KvShape(1, 1, 48, torch.bfloat16, value_dim)
    pool = KVCacheManager(shape, 4 * BLOCK_SIZE).pool
    size = 2 * shape.bytes_per_block
    expanded = 2 * 2 * 4 * 64 * BLOCK_SIZE * 2
    for length in (0, 1, 3, size // 2, size - 1, size - 2, size + 1, size + 2, 2 * size, expanded):
        with pytest.raises(InvalidRequest, match=f"{length} bytes are not 2 blocks"):
            pool.write(0, [1, 2], b"\x7f" * length)
    assert not any(part.any() for part in (*pool.k, *pool.v))
    pool.write(0, [1, 2], b"\x7f" * size)
    assert pool.k[0][1:3].all()


def test_only_an_empty_session_imports_within_its_reservation() -> None:
    cache = small_cache(4)
    cache.open(b"a", BLOCK_SIZE)
    with pytest.raises(InvalidRequest):
        cache.import_blocks(b"a", BLOCK_SIZE + 1)
    append(cache, b"a", 1)
    with pytest.raises(InvalidRequest):
        cache.import_blocks(b"a", 1)
    with pytest.raises(InvalidRequest):
        cache.block_ids(b"a", 2)
