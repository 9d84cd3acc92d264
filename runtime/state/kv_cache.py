"""Paged keys and values of the backbone: pages of a fixed number of tokens, and a page table on the device."""

import torch

from moss_runtime.model.config import BackboneConfig
from moss_runtime.state.free_list import Event, FreeList
from moss_runtime.state.pinned import pinned

PAGE_SIZE = 64


class OutOfPages(RuntimeError):
    """A row asked for more pages than are free."""


class PagedKV:
    """Keys and values of `rows` requests in shared pages.

    Reused pages are not cleared: whoever reads them stops at the row's length. Writes to the page table go to the
    current stream, which must be ordered with those that read it.

    Attributes:
        key_pages: [layers, pages + 1, KV heads, page_size, D]. Rotated keys. Page number `pages` is the null page.
        value_pages: likewise.
        page_table: [rows + 1, ceil(max_tokens / page_size)] int32. Pages of each row in the order of its tokens, then
            null pages. Row number `rows` is the null row of padding: null pages for ever.
    """

    def __init__(
        self,
        config: BackboneConfig,
        *,
        rows: int,
        pages: int,
        page_size: int = PAGE_SIZE,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        """Allocates all pages.

        Args:
            config: of the backbone.
            rows: requests at a time.
            pages: pages that all rows share.
            page_size: tokens of a page.
            max_tokens: most tokens of a row.
            dtype: of keys and values.
            device: of all tensors.
        """
        sizes = {"rows": rows, "pages": pages, "page_size": page_size, "max_tokens": max_tokens}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"PagedKV: `{name}` must be at least 1, got {size}")
        self.rows, self.pages, self.page_size, self.max_tokens = rows, pages, page_size, max_tokens
        shape = (config.num_hidden_layers, pages + 1, config.num_key_value_heads, page_size, config.head_dim)
        self.key_pages = torch.empty(shape, dtype=dtype, device=device)
        self.value_pages = torch.empty_like(self.key_pages)
        self.key_pages[:, pages] = 0
        self.value_pages[:, pages] = 0
        table_shape = (rows + 1, self.pages_for(max_tokens))
        self.page_table = torch.full(table_shape, pages, dtype=torch.int32, device=device)
        self._free = FreeList(pages)
        self._held: list[list[int]] = [[] for _ in range(rows)]

    @classmethod
    def bytes(
        cls,
        config: BackboneConfig,
        *,
        rows: int,
        pages: int,
        page_size: int = PAGE_SIZE,
        max_tokens: int,
        dtype: torch.dtype,
    ) -> int:
        """Device memory that a cache made with the same arguments takes."""
        sizes = {"rows": rows, "pages": pages, "page_size": page_size, "max_tokens": max_tokens}
        return cls(config, **sizes, dtype=dtype, device="meta").size_in_bytes

    @property
    def size_in_bytes(self) -> int:
        """Device memory of all tensors."""
        return self.key_pages.nbytes + self.value_pages.nbytes + self.page_table.nbytes

    @property
    def free_pages(self) -> int:
        """Pages that can be reserved now."""
        return self._free.available

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens of one row."""
        return -(-tokens // self.page_size)

    def pages_of(self, row: int) -> tuple[int, ...]:
        """Pages that a row holds, in the order of its tokens."""
        return tuple(self._held[self._checked(row)])

    def reserve(self, row: int, tokens: int) -> int:
        """Make sure that a row's pages cover its first `tokens` tokens. It keeps what it has.

        New entries of the page table are copied without waiting.

        Args:
            row: 0 .. rows - 1.
            tokens: 0 .. max_tokens.

        Returns:
            Tokens that its pages cover now.

        Raises:
            OutOfPages: too few pages are free; nothing has changed.
            ValueError: an argument is out of range.
        """
        held = self._held[self._checked(row)]
        if not 0 <= tokens <= self.max_tokens:
            raise ValueError(f"PagedKV: `tokens` must be in 0..{self.max_tokens}, got {tokens}")
        missing = self.pages_for(tokens) - len(held)
        if missing <= 0:
            return len(held) * self.page_size
        free = self._free.available
        if missing > free:
            raise OutOfPages(
                f"row {row} needs {missing} more KV pages of {self.page_size} tokens for {tokens} tokens; "
                f"{free} of {self.pages} are free"
            )
        fresh = self._free.take(missing)
        entries = pinned(fresh, self.page_table.dtype, self.page_table.device)
        self.page_table[row, len(held) : len(held) + missing].copy_(entries, non_blocking=True)
        held += fresh
        return len(held) * self.page_size

    def release(self, row: int, event: Event | None = None) -> None:
        """Give all pages of a row back; a row that holds none stays as it is.

        Args:
            row: 0 .. rows - 1.
            event: of the device's last use of the pages, if another stream may write them next; they are not handed
                out before it has completed.
        """
        held = self._held[self._checked(row)]
        if held:
            self.page_table[row].fill_(self.pages)
            self._free.give(held, event)
            self._held[row] = []

    def _checked(self, row: int) -> int:
        if not 0 <= row < self.rows:
            raise ValueError(f"PagedKV: `row` must be in 0..{self.rows - 1}, got {row}")
        return row
