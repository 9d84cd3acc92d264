"""The TTS model: from prompt rows to acoustic codes."""

import dataclasses
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from moss_kernels import SamplingParams, SamplingState
from moss_kernels.embed_codes import embed_codes_reference
from moss_kernels.local_frame_decode import LocalFrameWeights, local_frame_decode_reference
from moss_runtime.errors import CheckpointError, PromptError
from moss_runtime.model.backbone import Backbone, KVCache, embedding
from moss_runtime.model.checkpoint import load_weights
from moss_runtime.model.config import ModelConfig
from moss_runtime.model.local_transformer import LocalTransformer

DEFAULT_MAX_FRAMES = 4096
NOT_FINITE = "logits are not finite in {}: corrupt weights, or a dtype too narrow"


@dataclasses.dataclass(frozen=True)
class Generation:
    """What one prompt became.

    Attributes:
        codes: [n, n_vq] i64. Generated frames, without the frame that stopped; n may be 0.
        seed: the seed in force, given or drawn; the same request with this seed repeats the codes.
        finish_reason: "stop" (the model stopped) or "length" (cut at the frame limit or the end of the context),
            or "error" (logits were not finite: the weights are corrupt or overflow in the dtype); the frames before
            the error are kept.
    """

    codes: Tensor
    seed: int
    finish_reason: str


class MossTTS(nn.Module):
    """MOSS-TTS-Local-Transformer-v1.5 in eager PyTorch. State dict keys are the official names."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        hidden = config.backbone.hidden_size
        self.transformer = Backbone(config.backbone)
        self.local_transformer = LocalTransformer(config.local)
        self.audio_embeddings = nn.ModuleList(embedding(config.audio_vocab_size, hidden) for _ in range(config.n_vq))
        self.local_text_lm_head = nn.Linear(hidden, 2, bias=False)
        self._packed_tables: Tensor | None = None

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "MossTTS":
        """Load a checkpoint directory (`config.json` and `model.safetensors` or its shards).

        Raises:
            CheckpointError: the config or the tensors cannot be used; the message names the key or tensor.
        """
        model = cls.on_meta(ModelConfig.from_directory(directory))
        load_weights(model, directory, dtype=dtype, device=device, tied=model.tied)
        return model.eval()

    @classmethod
    def on_meta(cls, config: ModelConfig) -> "MossTTS":
        """The model without storage, to load into or to compare names and shapes with."""
        with torch.device("meta"):
            return cls(config)

    @property
    def tied(self) -> dict[str, str]:
        """Names that a checkpoint may hold besides the state dict -> the tensor each repeats."""
        return {f"audio_lm_heads.{q}.weight": f"audio_embeddings.{q}.weight" for q in range(self.config.n_vq)}

    @property
    def device(self) -> torch.device:
        return self.local_text_lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.local_text_lm_head.weight.dtype

    def frame_weights(self) -> LocalFrameWeights:
        """The tensors that decode a frame, by reference."""
        config, block = self.config, self.local_transformer.h[0]
        modules = {
            "ln_1": block.ln_1,
            "c_attn": block.attn.c_attn,
            "c_proj": block.attn.c_proj,
            "ln_2": block.ln_2,
            "fc_in": block.mlp.fc_in,
            "fc_out": block.mlp.fc_out,
            "ln_f": self.local_transformer.ln_f,
        }
        return LocalFrameWeights(
            **{f"{name}_weight": module.weight for name, module in modules.items()},
            **{f"{name}_bias": module.bias for name, module in modules.items()},
            stop_head=self.local_text_lm_head.weight,
            audio_embeddings=self._audio_tables(),
            embed_tokens=self.transformer.embed_tokens.weight,
            n_head=config.local.n_head,
            rope_base=config.local.rope_base,
            layer_norm_epsilon=config.local.layer_norm_epsilon,
            pad_token_id=config.pad_token_id,
            audio_pad_token_id=config.audio_pad_token_id,
            audio_assistant_slot_token_id=config.audio_assistant_slot_token_id,
        )

    def embed(self, rows: Tensor) -> Tensor:
        """Input embeddings [..., H] of rows [..., 1+n_vq] i64: a text id and n_vq codes or pad codes each."""
        return embed_codes_reference(
            rows[..., 0],
            rows[..., 1:],
            self.transformer.embed_tokens.weight,
            self._audio_tables(),
            self.config.audio_pad_token_id,
        )

    def generate(
        self,
        prompts: Sequence[Tensor],
        params: Sequence[SamplingParams],
        *,
        max_frames: int | Sequence[int] = DEFAULT_MAX_FRAMES,
        on_frame: Callable[[Tensor, Tensor], None] | None = None,
    ) -> list[Generation]:
        """Generate every prompt to its end.

        Args:
            prompts: B tensors [T_i, 1+n_vq] i64, as `PromptBuilder` makes them; lengths may differ.
            params: sampling parameters and seed of each prompt; where the seed is None, one is drawn.
            max_frames: limit for all or for each, at least 1. The end of the context limits too.
            on_frame: called after each step with what `generate_frames` yields.

        Raises:
            As `generate_frames`, but a row whose logits are not finite ends with the finish reason "error".
        """
        params, limits = self.admit(prompts, params, max_frames)
        frames: list[list[Tensor]] = [[] for _ in prompts]
        failed: set[int] = set()
        for codes, is_frame in self._frames(prompts, params, limits, failed):
            for row in is_frame.nonzero()[:, 0].tolist():
                frames[row].append(codes[row])
            if on_frame is not None:
                on_frame(codes, is_frame)
        none = torch.empty(0, self.config.n_vq, dtype=torch.int64, device=self.device)
        return [
            Generation(
                codes=torch.stack(row) if row else none,
                seed=row_params.seed,
                finish_reason="error" if index in failed else "length" if len(row) == limit else "stop",
            )
            for index, (row, row_params, limit) in enumerate(zip(frames, params, limits, strict=True))
        ]

    def generate_frames(
        self,
        prompts: Sequence[Tensor],
        params: Sequence[SamplingParams],
        *,
        max_frames: int | Sequence[int] = DEFAULT_MAX_FRAMES,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Generate frame by frame, for a caller that streams.

        A draw depends on (seed, frame, channel) alone. A request without a seed gets one that nobody learns of; call
        `with_seeds` first to report it.

        Args:
            prompts: as in `generate`.
            params: as in `generate`.
            max_frames: as in `generate`.

        Yields:
            codes: [B, n_vq] i64 on the model's device; pad codes in rows that have finished.
            is_frame: [B] bool. The row produced a frame; it is True for the first n_i steps of row i, then False.

        Raises:
            PromptError: a prompt is empty, longer than the context, or holds an id or code out of range.
            ValueError: shapes or counts do not fit, or max_frames is below 1.
            TypeError: a prompt is not int64, or max_frames is not an integer.
            CheckpointError: logits of a row were not finite: the weights are corrupt or overflow in the dtype. The row
                ends there; the error comes after the last frame of the others.
        """
        failed: set[int] = set()
        yield from self._frames(prompts, *self.admit(prompts, params, max_frames), failed)
        if failed:
            raise CheckpointError(f"prompts {sorted(failed)}: {NOT_FINITE.format(self.dtype)}")

    @torch.no_grad()
    def _frames(
        self,
        prompts: Sequence[Tensor],
        params: Sequence[SamplingParams],
        limits: Sequence[int],
        failed: set[int],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As `generate_frames`, with what `admit` returns; puts rows whose logits are not finite in `failed`."""
        config, batch, weights = self.config, len(prompts), self.frame_weights()
        state = SamplingState.allocate(
            rows=batch, codebooks=config.n_vq, vocab=config.audio_vocab_size, device=self.device
        )
        for row, row_params in enumerate(params):
            state.set_row(row, row_params, seed=row_params.seed)
        frame_limits = torch.tensor(limits, device=self.device)
        row_map = torch.arange(batch, dtype=torch.int32, device=self.device)
        active = torch.ones(batch, dtype=torch.bool, device=self.device)

        cache = self.transformer.new_cache(batch)
        # The last row is not prefilled: it is the input of the first frame, as the feedback is that of later frames.
        embeds = self._prefill(prompts, cache)
        while True:
            hidden = self.transformer(embeds[:, None], cache)[:, 0]
            frame = local_frame_decode_reference(hidden, weights, state, row_map, active)
            broken = frame.status != 0
            failed.update(broken.nonzero()[:, 0].tolist())
            is_frame = frame.continues & ~broken
            if not is_frame.any():
                return
            yield frame.codes.where(is_frame[:, None], config.audio_pad_token_id), is_frame
            active = is_frame & (state.frame[:batch] < frame_limits)
            if not active.any():
                return
            embeds = frame.feedback

    def _prefill(self, prompts: Sequence[Tensor], cache: KVCache) -> Tensor:
        """Run all rows but the last of each prompt, padded on the left; returns the last rows' embeddings [B, H]."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        longest = int(lengths.max())
        rows = torch.full((len(prompts), longest, 1 + self.config.n_vq), self.config.audio_pad_token_id)
        rows[..., 0] = self.config.pad_token_id
        for padded, prompt in zip(rows, prompts, strict=True):
            padded[longest - len(prompt) :] = prompt
        embeds = self.embed(rows.to(self.device))
        if longest > 1:
            columns = torch.arange(longest - 1, device=self.device)
            self.transformer(embeds[:, :-1], cache, columns >= longest - lengths[:, None])
        return embeds[:, -1]

    def admit(
        self, prompts: Sequence[Tensor], params: Sequence[SamplingParams], max_frames: int | Sequence[int]
    ) -> tuple[list[SamplingParams], list[int]]:
        """Check a batch; its parameters with seeds, and how many frames each prompt may have in the context."""
        if len(prompts) == 0:
            raise ValueError("generate: `prompts` must hold at least one prompt, got none")
        if len(params) != len(prompts):
            raise ValueError(
                f"generate: `params` must hold one entry for each of {len(prompts)} prompts, got {len(params)}"
            )
        for index, one in enumerate(params):
            if not isinstance(one, SamplingParams):
                raise TypeError(f"generate: `params[{index}]` must be a SamplingParams, got {type(one).__name__}")
        limits = [max_frames] * len(prompts) if isinstance(max_frames, int) else list(max_frames)
        if len(limits) != len(prompts):
            raise ValueError(
                f"generate: `max_frames` must be one integer or {len(prompts)} integers, got {len(limits)}"
            )
        for limit in limits:
            if not isinstance(limit, int) or isinstance(limit, bool):
                raise TypeError(f"generate: `max_frames` must be an integer, got {limit!r}")
            if limit < 1:
                raise ValueError(f"generate: `max_frames` must be at least 1, got {limit}")
        for index, prompt in enumerate(prompts):
            self._check_prompt(f"prompts[{index}]", prompt)
        # The frame number n (from 0) reads the context's position T - 1 + n.
        context = self.config.backbone.max_position_embeddings
        limits = [min(limit, context + 1 - len(prompt)) for limit, prompt in zip(limits, prompts, strict=True)]
        return with_seeds(params), limits

    def _check_prompt(self, name: str, prompt: Tensor) -> None:
        config = self.config
        if not isinstance(prompt, Tensor) or prompt.dtype != torch.int64:
            raise TypeError(f"generate: `{name}` must be an int64 tensor, got {getattr(prompt, 'dtype', type(prompt))}")
        if prompt.dim() != 2 or prompt.shape[1] != 1 + config.n_vq:
            raise ValueError(f"generate: `{name}` must be [T, {1 + config.n_vq}], got {tuple(prompt.shape)}")
        context = config.backbone.max_position_embeddings
        if not 1 <= len(prompt) <= context:
            raise PromptError(f"{name}: must have 1..{context} rows (the model's context), got {len(prompt)}")
        # Nearly all prompts are right, and their extremes say so where the pad code comes right behind the codes.
        least, most = (extremes.tolist() for extremes in prompt.aminmax(dim=0))
        behind = config.audio_vocab_size + (config.audio_pad_token_id == config.audio_vocab_size)
        if min(least) >= 0 and most[0] < config.backbone.vocab_size and max(most[1:]) < behind:
            return
        text_ids, codes = prompt[:, 0], prompt[:, 1:]
        wrong_id = (text_ids < 0) | (text_ids >= config.backbone.vocab_size)
        wrong_code = ((codes < 0) | (codes >= config.audio_vocab_size)) & (codes != config.audio_pad_token_id)
        for wrong, expected in (
            (wrong_id[:, None], f"a text id in 0..{config.backbone.vocab_size - 1}"),
            (wrong_code, f"a code in 0..{config.audio_vocab_size - 1} or the pad code {config.audio_pad_token_id}"),
        ):
            if wrong.any():
                row, column = wrong.nonzero()[0].tolist()
                column += wrong is wrong_code
                value = prompt[row, column].item()
                raise PromptError(f"{name}: row {row}, column {column} must be {expected}, got {value}")

    def _audio_tables(self) -> Tensor:
        """[n_vq, V, H]. Embeddings of all codebooks in one piece; the modules' own become views of it."""
        tables = [table.weight.detach() for table in self.audio_embeddings]
        packed = self._packed_tables
        if packed is None or any(a.data_ptr() != b.data_ptr() for a, b in zip(tables, packed, strict=True)):
            packed = self._packed_tables = torch.stack(tables)
            for module, part in zip(self.audio_embeddings, packed, strict=True):
                module.weight = nn.Parameter(part, requires_grad=False)
        return packed


def with_seeds(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """The same parameters, with a seed drawn by the host wherever there was none."""
    return [p if p.seed is not None else dataclasses.replace(p, seed=secrets.randbits(63)) for p in params]
