"""Pages of keys and values: who holds which, and what the page table says."""

import dataclasses

import pytest
import torch

from moss_runtime.model.config import BackboneConfig, ModelConfig
from moss_runtime.state.kv_cache import OutOfPages, PagedKV

ROWS, PAGES, PAGE_SIZE, MAX_TOKENS = 3, 7, 4, 18


@pytest.fixture
def config(golden) -> BackboneConfig:
    return ModelConfig.from_directory(golden("local_hd16").directory).backbone


@pytest.fixture
def kv(config) -> PagedKV:
    sizes = {"rows": ROWS, "pages": PAGES, "page_size": PAGE_SIZE, "max_tokens": MAX_TOKENS}
    return PagedKV(config, **sizes, dtype=torch.bfloat16, device="cpu")


class Event:
    done = False

    def query(self) -> bool:
        return self.done


def require_table(kv: PagedKV) -> None:
    """The table names the held pages, each page once, then null pages."""
    held = [kv.pages_of(row) for row in range(kv.rows)]
    for row, pages in enumerate([*held, ()]):
        assert kv.page_table[row].tolist() == [*pages, *[kv.pages] * (kv.page_table.shape[1] - len(pages))]
    assert len({page for pages in held for page in pages}) == sum(map(len, held))


def test_layout(kv, config):
    heads, head_dim = config.num_key_value_heads, config.head_dim
    shape = (config.num_hidden_layers, PAGES + 1, heads, PAGE_SIZE, head_dim)
    assert kv.key_pages.shape == kv.value_pages.shape == shape
    assert kv.key_pages.data_ptr() != kv.value_pages.data_ptr()
    assert kv.page_table.shape == (ROWS + 1, 5)
    assert kv.page_table.dtype == torch.int32
    assert not kv.key_pages[:, PAGES].any() and not kv.value_pages[:, PAGES].any()
    require_table(kv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_size_is_known_before_allocation(config, dtype):
    sizes = {"rows": ROWS, "pages": PAGES, "page_size": PAGE_SIZE, "max_tokens": MAX_TOKENS, "dtype": dtype}
    kv = PagedKV(config, **sizes, device="cpu")
    tensors = [value for value in vars(kv).values() if isinstance(value, torch.Tensor)]
    allocated = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert PagedKV.bytes(config, **sizes) == kv.size_in_bytes == allocated
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    assert allocated == (PAGES + 1) * PAGE_SIZE * token + (ROWS + 1) * 5 * 4


def test_reserve_adds_what_is_missing(kv):
    kv.reserve(1, 0)
    assert kv.pages_of(1) == () and kv.free_pages == 7
    kv.reserve(1, 1)
    (first,) = kv.pages_of(1)
    kv.reserve(1, PAGE_SIZE)
    assert kv.pages_of(1) == (first,)
    kv.reserve(1, PAGE_SIZE + 1)
    assert kv.pages_of(1)[0] == first and len(kv.pages_of(1)) == 2
    kv.reserve(1, 1)
    assert len(kv.pages_of(1)) == 2 and kv.free_pages == 5
    kv.reserve(0, MAX_TOKENS)
    require_table(kv)
    assert kv.free_pages == 0


def test_too_few_pages_change_nothing(kv):
    kv.reserve(0, 16)
    kv.reserve(2, 5)
    before, table = kv.pages_of(2), kv.page_table.clone()
    with pytest.raises(OutOfPages, match="row 2 needs 2 more KV pages of 4 tokens for 13 tokens; 1 of 7 are free"):
        kv.reserve(2, 13)
    assert kv.pages_of(2) == before and kv.free_pages == 1
    assert torch.equal(kv.page_table, table)
    kv.reserve(2, 12)
    require_table(kv)


def test_pages_come_back_once(kv):
    kv.reserve(0, 16)
    kv.reserve(1, 12)
    kv.release(0)
    kv.release(0)
    assert kv.free_pages == 4
    kv.reserve(2, 16)
    require_table(kv)
    assert not set(kv.pages_of(1)) & set(kv.pages_of(2))


def test_pages_wait_for_their_event(kv):
    event = Event()
    kv.reserve(0, 16)
    kv.reserve(1, 12)
    kv.release(0, event)
    assert kv.free_pages == 0
    require_table(kv)
    with pytest.raises(OutOfPages, match="0 of 7 are free"):
        kv.reserve(2, 1)
    event.done = True
    kv.reserve(2, 16)
    assert kv.free_pages == 0
    require_table(kv)


def test_contents_of_pages_stay(kv):
    """Nothing is cleared: neither time nor the values of a row that still is read are lost."""
    kv.key_pages[:, :PAGES] = torch.nan
    kv.reserve(0, 8)
    kv.release(0)
    kv.reserve(0, 8)
    assert kv.key_pages[:, :PAGES].isnan().all()
    assert not kv.key_pages[:, PAGES].any()


@pytest.mark.parametrize("row", [-1, ROWS, ROWS + 1])
def test_no_such_row(kv, row):
    for call in (lambda: kv.reserve(row, 1), lambda: kv.release(row), lambda: kv.pages_of(row)):
        with pytest.raises(ValueError, match=f"PagedKV: `row` must be in 0..2, got {row}"):
            call()


def test_wrong_sizes(kv, config):
    with pytest.raises(ValueError, match=r"PagedKV: `tokens` must be in 0\.\.18, got 19"):
        kv.reserve(0, MAX_TOKENS + 1)
    with pytest.raises(ValueError, match="PagedKV: `pages` must be at least 1, got 0"):
        PagedKV(config, rows=1, pages=0, max_tokens=4, dtype=torch.float32, device="cpu")


def test_sizes_of_the_released_model(config):
    """147,456 bytes for a token in bf16."""
    full = dataclasses.replace(config, num_hidden_layers=36, num_key_value_heads=8, head_dim=128)
    small, large = (
        PagedKV.bytes(full, rows=1, pages=pages, max_tokens=64, dtype=torch.bfloat16) for pages in (100, 101)
    )
    assert large - small == 64 * 147_456


@pytest.mark.gpu
def test_reserve_does_not_wait(config):
    """The copies into the page table are behind a long kernel, and the pinned memory they come from is not reused."""
    sizes = {"rows": 64, "pages": 64 * 5, "page_size": PAGE_SIZE, "max_tokens": MAX_TOKENS}
    kv = PagedKV(config, **sizes, dtype=torch.bfloat16, device="cuda")
    kv.reserve(0, 1)
    # Pinned memory that the host allocator has to get first may wait.
    pinned = [torch.zeros(1, dtype=torch.int32).pin_memory() for _ in range(400)]
    del pinned
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tokens in range(1, MAX_TOKENS + 1):
            for row in range(64):
                kv.reserve(row, tokens)
        for row in range(0, 64, 2):
            kv.release(row)
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    require_table(kv)
