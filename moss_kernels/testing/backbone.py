"""Random weights and paged inputs of the backbone for tests and benchmarks."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

# Full size; tests make the layers fewer.
FULL_BACKBONE = {
    "vocab_size": 32,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
# Gain of the linears by the part of the name that tells them apart; those into the residual stream add a little each.
_GAINS = {
    "q_proj": 1.0,
    "k_proj": 1.0,
    "v_proj": 1.0,
    "o_proj": 0.5,
    "gate_proj": 1.2,
    "up_proj": 1.2,
    "down_proj": 0.5,
}


def backbone_weights(
    shapes: Mapping[str, Sequence[int]], seed: int, *, device: torch.device | str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Weights for the tensors of a backbone, by their official names: activations of order one, scores of order two.

    Args:
        shapes: name -> shape of each tensor.
        seed: the same weights for the same seed, device kind, dtype and shapes.
        device: where to make them.
        dtype: of all of them.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def tensor(name: str, shape: Sequence[int]) -> torch.Tensor:
        values = torch.randn(tuple(shape), generator=generator, device=device)
        if "norm" in name:
            # Queries and keys of unit variance would give scores of variance one.
            return (values.mul_(0.2) + (1.5 if "q_norm" in name or "k_norm" in name else 1.0)).to(dtype)
        gain = next((gain for part, gain in _GAINS.items() if part in name), math.sqrt(shape[-1]))
        return values.mul_(gain / math.sqrt(shape[-1])).to(dtype)

    return {name: tensor(name, shape) for name, shape in shapes.items()}


@dataclasses.dataclass
class PagedInputs:
    """Pages of one or more layers, and the rows of a step. What must not matter is NaN.

    Attributes:
        key_pages, value_pages: [layers, P+1, H, Z, D]. NaN beyond each row's tokens, in free pages and the null page.
        page_table: [S+1, N] int32. Pages in shuffled order; the null page where a row has none.
        positions: [S+1] int32. Tokens that each pool row holds.
        row_map: [B] int32.
        active: [B] bool.
    """

    key_pages: torch.Tensor
    value_pages: torch.Tensor
    page_table: torch.Tensor
    positions: torch.Tensor
    row_map: torch.Tensor
    active: torch.Tensor

    @classmethod
    def make(
        cls,
        rows: Sequence[tuple[int, bool]],
        *,
        kv_heads: int,
        head_dim: int,
        page_size: int = 64,
        max_tokens: int | None = None,
        layers: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> "PagedInputs":
        """Random keys (variance 2.25, as normalised ones have here) and values.

        Args:
            rows: (tokens held, active) of each batch row; None tokens: a padding row, which points at the null row.
            kv_heads, head_dim, page_size, layers: sizes.
            max_tokens: that the page table has room for; by default what the longest row needs with the new token.
            dtype, device: of the pages.
            seed: of everything random.
        """
        generator = torch.Generator().manual_seed(seed)
        held = [tokens for tokens, _ in rows if tokens is not None]
        slots = math.ceil(max((max_tokens or 0, 1, *(tokens + 1 for tokens in held))) / page_size)
        needed = [math.ceil((tokens + 1) / page_size) for tokens in held]
        null_page = sum(needed) + 2
        order = torch.randperm(null_page, generator=generator)
        pool_rows = torch.randperm(len(held), generator=generator)
        page_table = torch.full((len(held) + 1, slots), null_page, dtype=torch.int32)
        positions = torch.zeros(len(held) + 1, dtype=torch.int32)
        row_map = torch.full((len(rows),), len(held), dtype=torch.int32)
        places = [index for index, (tokens, _) in enumerate(rows) if tokens is not None]
        shape = (layers, null_page + 1, kv_heads, page_size, head_dim)
        device_generator = torch.Generator(device).manual_seed(seed)
        keys = torch.randn(shape, generator=device_generator, dtype=dtype, device=device).mul_(1.5)
        values = torch.randn(shape, generator=device_generator, dtype=dtype, device=device)
        unused = torch.ones(null_page + 1, page_size, dtype=torch.bool)
        for place, row, tokens, pages in zip(places, pool_rows.tolist(), held, needed, strict=True):
            own, order = order[:pages], order[pages:]
            page_table[row, :pages] = own.int()
            positions[row], row_map[place] = tokens, row
            unused[own] = (torch.arange(pages * page_size) >= tokens).view(pages, page_size)
        hidden = unused.to(device)[None, :, None, :, None]
        active = torch.tensor([live for _, live in rows])
        rest = (tensor.to(device) for tensor in (page_table, positions, row_map, active))
        return cls(keys.masked_fill_(hidden, torch.nan), values.masked_fill_(hidden, torch.nan), *rest)

    def layer(self, index: int = 0) -> tuple[torch.Tensor, ...]:
        """Arguments that `kv_append` and `paged_attention` share: one layer's pages, then the rows."""
        rows = (self.page_table, self.positions, self.row_map, self.active)
        return self.key_pages[index], self.value_pages[index], *rows

    def take(self, rows: Sequence[int]) -> "PagedInputs":
        """The same pages with some of the batch rows, in that order."""
        index = torch.tensor(rows, device=self.row_map.device)
        return dataclasses.replace(self, row_map=self.row_map[index], active=self.active[index])

    def clone(self) -> "PagedInputs":
        return PagedInputs(*(getattr(self, field.name).clone() for field in dataclasses.fields(self)))
